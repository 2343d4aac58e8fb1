"""What is on disk and on the screen: a recipe becomes a job, a job a run folder that can be resumed to the bit.

In: a `Recipe`. Out: a folder with configuration, metrics, every rollout, checkpoints and the final model. `prepare` reads
everything but weights and makes the plan, `job.make_job` puts policy, engine and loop together, `run.train` drives them, `stages`
drives every stage of a recipe, and `saving` continues from a checkpoint; `folder` is the only module that knows the files' names.
"""
