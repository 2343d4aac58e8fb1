"""Other people's dashboards: TensorBoard, Weights & Biases, MLflow and Trackio get a run's metrics and its most telling groups.

In come the lines of metrics.jsonl and the groups of steps; out they go through each library, which one file imports.  What a run is
resumed and kept by is its folder: a dashboard that fails is named in a warning and left alone, and the run continues.

Use `Dashboards` (`base.py`).
"""
