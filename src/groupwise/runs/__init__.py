"""What is on disk: a recipe becomes a job, a job a run folder that can be resumed to the bit.

In: a `Recipe`.  Out: a folder with configuration, metrics, every rollout, checkpoints and the final
model.

- `run`: drives a job: resume, log, save, evaluate, export.
- `prepared`: what is known before weights are loaded: model, data, rewards and the plan.
- `plan`: prompts, updates and memory of a run, in numbers.
- `step_time`, `measured_speeds`: seconds of a step, by what was measured on such a device.
- `job`: policy, engine, optimizer and loop; what a checkpoint holds.
- `compiling`: whether the policy's blocks are compiled, or run in FP8.
- `run_models`, `engines`, `environments`: the models, the sampler and the environment of a recipe.
- `images`: what a run of prompts with images asks of its parts.
- `checkpoint`: checkpoints that are whole or are not there.
- `best`: the best evaluation of a run, and the end that follows from it.
- `folder`, `lock`: which folder a run has, how it stands, and who writes there.
- `run_files`: the only way in which the files of a run folder are written and read.
- `starts`, `final_model`: each start of a run, and the model that it leaves.
- `origin`: the run that a path belongs to.
- `metrics_log`, `run_log`: metrics.jsonl, and all that is written step by step.
- `rollout_table`, `rollout_files`: steps as Parquet tables, and the files that hold them.
- `inputs`, `trust`: what a run was trained on, and whose code it names.
- `interrupts`: signals that end a run.
- `dashboards`, `model_card`: TensorBoard and others, and the card of the final model.

No loop, loss or engine imports this package.
"""
