"""What is on disk: a recipe becomes a job, a job a run folder that can be resumed to the bit.

In: a `Recipe`. Out: a folder with configuration, metrics, every rollout, checkpoints and the final
    model. `prepared` reads data and rewards and writes the plan, `job` adds policy, engine and
    loop. `run` drives a job: resume, log, save, evaluate, export. `checkpoint` saves a job,
    `folder` knows how a run stands, `recorded` and `log` read and write its lines and completions,
    `rollout_table` is the form in which rollouts lie in files, `inputs` knows what it was trained
    on.
"""
