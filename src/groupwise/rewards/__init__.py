"""Rewards: completions in, one number or None per completion and function out.

`compose.build_rewards` makes what a recipe names; `registry.BUILTINS` is the table of built-in functions.  Importing this
package imports nothing: its worker processes start through it, and a start should cost milliseconds.
"""
