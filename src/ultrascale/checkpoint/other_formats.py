"""Formats of others that are not read: known by the names of their files, and refused with what to run there first."""

from __future__ import annotations

from pathlib import Path

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.dcp_folder import INDEX
from ultrascale.checkpoint.manifest import MANIFEST
from ultrascale.models.other_trainers import MEGATRON

_PICKLED = "pickled weights can run code when they are read and are not opened: save them there as safetensors first"
_MEGATRON = (
    "this is Megatron's older format, whose files are pickled and are not opened; run the training script there once "
    "with --ckpt-convert-format torch_dist --ckpt-convert-save DIR, or export with " + MEGATRON.advice
)
_DEEPSPEED = (
    "this is DeepSpeed's format, whose files are pickled and are not opened; run the folder's own `python "
    "zero_to_fp32.py . OUT --safe_serialization` there, put config.json beside, and `ultrascale convert from-hf OUT`"
)
_OTHERS = (
    (MANIFEST, "it is a checkpoint of ours already: run.resume names it"),
    ("**/zero_pp_rank_*", _DEEPSPEED),
    ("**/*_optim_states.pt", _DEEPSPEED),
    ("zero_to_fp32.py", _DEEPSPEED),
    ("**/mp_rank_*/model_optim_rng.pt", _MEGATRON),
    ("**/mp_rank_*/distrib_optim.pt", _MEGATRON),
    ("**/.zarray", "this is Megatron's format zarr; load and save it there with --ckpt-format torch_dist"),
    ("__*.metadata", "each rank wrote metadata of its own; save it with use_collectives=True"),
    ("*.safetensors", "run `ultrascale convert from-hf`"),
    ("pytorch_model*.bin", f"{_PICKLED}, with transformers' save_pretrained(), and run `ultrascale convert from-hf`"),
    ("*.distcp", "the save that wrote this was not finished, or the file was lost"),
    ("*.pt", f"{_PICKLED}, with transformers' save_pretrained(), and run `ultrascale convert from-hf`"),
    ("*.pth", f"{_PICKLED}, with transformers' save_pretrained(), and run `ultrascale convert from-hf`"),
)
"""What other formats have in their folders, and what is to be done with them there."""


def refuse_other_formats(path: Path) -> None:
    """Raises CheckpointError that says what to run there first, for a folder that is no DCP folder; opens no file."""
    if (path / INDEX).is_file():
        return
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    if path.is_file():
        raise CheckpointError(f"{path} is a file; {_PICKLED}, as transformers' save_pretrained() does")
    inside = sorted(path.glob(f"*/{INDEX}"))
    if inside:
        raise CheckpointError(f"{path} holds checkpoints and is none itself; give one of them, as {inside[-1].parent}")
    for pattern, advice in _OTHERS:
        found = next(iter(sorted(path.glob(pattern))), None)
        if found is not None:
            raise CheckpointError(f"{path}: {found.name} is there, and no {INDEX}: {advice}")
    raise CheckpointError(f"{path} is no folder of torch.distributed.checkpoint: it has no {INDEX}")
