"""What a schedule is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from ultrascale.pipeline.costs import Costs


@dataclass(frozen=True)
class Request:
    """The numbers of a pipeline that a schedule is built for.

    ranks             pp coordinates
    micro_batches     per step
    virtual_stages    stages per rank: the user's number, or the schedule's own
    costs             of each action; only schedules that order by cost look at them
    group_size        micro-batches that run one after another on a virtual stage before the next stage's turn
                      (interleaved schedules; Llama 3's N); None: the schedule's own
    activation_limit  (stage × micro-batch) that each rank may hold at once (automatic schedules); None: the
                      schedule's own
    """

    ranks: int
    micro_batches: int
    virtual_stages: int = 1
    costs: Costs = field(default_factory=Costs)
    group_size: int | None = None
    activation_limit: int | None = None

    @property
    def stages(self) -> int:
        """Stages of the model, virtual ones included."""
        return self.ranks * self.virtual_stages
