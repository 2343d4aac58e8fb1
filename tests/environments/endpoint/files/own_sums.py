"""A taskset of verifiers, as its own documentation has them: sums, and a reward for even answers."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def even(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2 == 0)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for i in range(12):
            yield SumTask(SumData(prompt=f"{i}+{i}", system_prompt="Add.", answer=2 * i), self.config.task)


__all__ = ["SumTaskset"]
