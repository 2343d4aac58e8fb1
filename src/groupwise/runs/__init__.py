"""What is on disk and on the screen: a recipe becomes a job, a job a run folder that can be resumed to the bit.

In: a `Recipe`. Out: a folder with configuration, metrics, every rollout, checkpoints and the final model. `prepare` makes the plan,
`build.make_job` puts data, policy, rewards, engine and loop together, `run.train` drives them and `resume` continues from a
checkpoint; `folder` is the only module that knows the files' names.
"""
