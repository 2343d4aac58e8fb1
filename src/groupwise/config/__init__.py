"""How a run is described: every setting with its meaning, and the way from YAML and dotted
overrides to a `Recipe`.

In: a recipe file, overrides. Out: `settings.Recipe`, frozen and checked, or one ConfigError that
    lists every problem with its line. `settings` is the one place to read what can be set;
    `recipes` reads and writes; `validation` checks values against each other; `resolve` makes an
    algorithm of a recipe. Nothing here imports torch.
"""
