"""What deep_ep.Buffer promises, on CPU: its signatures, and what goes where, by plain collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Event:
    def __init__(self) -> None:
        self.awaited = False

    def current_stream_wait(self) -> None:
        self.awaited = True


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


def _swap(pieces: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Piece i to member i."""
    sizes = torch.tensor([piece.shape[0] for piece in pieces])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)
    joined = torch.cat(pieces)
    out = joined.new_empty(int(arriving.sum()), *joined.shape[1:])
    dist.all_to_all_single(out, joined, arriving.tolist(), sizes.tolist(), group=group)
    return list(out.split(arriving.tolist()))


class Buffer:
    """High-throughput dispatch and combine of DeepEP's first interface."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.size = group, group.size()
        self.rank = dist.get_rank(group)

    @staticmethod
    def capture() -> _Event:
        return _Event()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> _Config:
        return _Config()

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        each = num_experts // self.size
        ranks = torch.arange(self.size)
        in_rank = ((topk_idx // each).masked_fill(topk_idx < 0, -1).unsqueeze(-1) == ranks).any(1)
        per_expert = (topk_idx.unsqueeze(-1) == torch.arange(num_experts)).sum((0, 1))
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, _Event()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert async_finish
        assert previous_event is not None
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            in_rank, _ = handle
            rows = _swap([x[in_rank[:, rank]] for rank in range(self.size)], self.group)
            return torch.cat(rows), None, None, None, None, _Event()
        assert is_token_in_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        each = num_tokens_per_expert.numel() // self.size
        tokens, choices, weights = [], [], []
        for rank in range(self.size):
            going = is_token_in_rank[:, rank]
            local = topk_idx[going] - rank * each
            elsewhere = (local < 0) | (local >= each)
            tokens.append(x[going])
            choices.append(local.masked_fill(elsewhere, -1))
            weights.append(topk_weights[going].masked_fill(elsewhere, 0.0))
        arrived = _swap(tokens, self.group)
        received = torch.cat(_swap(choices, self.group))
        counts = [int((received == expert).sum()) for expert in range(each)]
        handle = (is_token_in_rank, [part.shape[0] for part in arrived])
        return torch.cat(arrived), received, torch.cat(_swap(weights, self.group)), counts, handle, _Event()

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        previous_event: _Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, _Event]:
        in_rank, sizes = handle
        return self._home(x, in_rank, sizes), self._home(topk_weights, in_rank, sizes), _Event()

    def _home(self, x: Any, in_rank: torch.Tensor, sizes: list[int]) -> Any:
        """Added over ranks, without weights."""
        if x is None:
            return None
        total = x.new_zeros(in_rank.shape[0], x.shape[1])
        for rank, part in enumerate(_swap(list(x.split(sizes)), self.group)):
            total[in_rank[:, rank]] += part
        return total
