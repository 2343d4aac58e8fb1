"""What is on disk and on the screen: a recipe becomes a job, a job a run folder that can be resumed to the bit.

In: a `Recipe`. Out: a folder with configuration, metrics, every rollout, checkpoints and the final model. `job` walks the recipe
once: data, rewards and plan, then policy, engine and loop. `run` drives a job: resume, log, save, evaluate, export. `stages` drives
every stage of a recipe with what a terminal shows. `checkpoint` saves a job, `folder` knows how a run stands, `recorded` and `log`
read and write its lines and completions, `inputs` knows what it was trained on, `replay` computes a recorded step again.
"""
