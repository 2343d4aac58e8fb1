"""What is good: completions in, one number or None per completion and function out.

In: groups of rollouts.  Out: `records.RolloutGroup`.

- `compose`: makes the rewards that a recipe names; `Rewards` scores groups.
- `registry`: knows the built-in functions by name.
- `user_functions`: reads the signature of a reward function, and checks what it returned.
- `calls`, `functions`: call reward functions in worker processes, which may never return: the
  trainer's side, and the worker's.
- `completions`: shows rollouts as functions see them.
- `trainer_state`: holds what functions may read of the run, and log.
- `step_rewards`: rewards single steps of a completion.
- `accuracy`, `format`, `length`, `environment`, `model`: the built-in functions.
- `ifeval`: rewards instructions that a program can check.
- `answers`, `final_message`: find the answer in a text.
- `gold_forms`, `equality`, `restatement`: decide whether an answer is the gold.
- `answer_shapes`, `quantities`, `expressions`: read answers: lists, units, LaTeX.
- `math_checker`: asks math-verify where our own rules leave it open.
- `judge`: asks a model on a server for scores; `judge_client` calls it.
- `code`: rewards programs; finds one in a completion, and has it graded.
- `grading`: runs programs against their tests, in sandboxes.
- `program_tests`: reads tests as data sets write them.

Importing this package imports nothing: worker processes start through it, and a start should cost
milliseconds.  Nothing here knows of training, algorithms or runs.
"""
