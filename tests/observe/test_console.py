"""The step line has one form that programs can read, and ranks other than 0 are silent."""

import io
import re
import subprocess
import sys

import pytest
import torch

from ultrascale.observe.console import Console, StartUp, count, duration, size
from ultrascale.observe.memory import peak_memory, peak_resident
from ultrascale.observe.mfu import flops_per_token, mfu, peak_flops

RECORD = {
    "step": 120,
    "loss": 2.41312,
    "lm_loss": 2.41312,
    "lr": 3e-4,
    "grad_norm": 0.8311,
    "tokens": 10**6,
    "tokens_per_s": 12345.0,
    "step_time_s": 13.1,
    "mfu": 0.4118,
    "peak_memory_bytes": int(1.2 * 2**30),
}
LINE = (
    "step 120/1000 | loss 2.4131 | grad_norm 0.83 | lr 3.0e-04 | tokens/s 12.3k | MFU 41.2% | memory 1.2 GiB "
    "| ETA 3h12m"
)
START_UP = StartUp(
    name="debug",
    run_dir="runs/debug",
    device="cpu",
    axes={"pp": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2},
    parameters=8_030_261_248,
    rank_parameters=4_015_130_624,
    global_size=16,
    micro_size=2,
    replicas=2,
    sequence_length=64,
    schedule="1f1b",
    precision={"compute": "bfloat16", "masters": "float32"},
    steps=1000,
    first_step=11,
)


def shown(tty: bool, rank: int = 0, every: int = 1, records=(RECORD,)) -> str:
    stream = io.StringIO()
    console = Console(1000, rank=rank, every=every, stream=stream, tty=tty)
    console.start(START_UP)
    for record in records:
        console.step(record)
    console.say("[saved] 100% to runs/debug")
    console.close()
    console.close()
    return stream.getvalue()


def test_a_step_is_one_line_of_the_documented_form_without_a_terminal():
    lines = shown(tty=False).splitlines()
    assert LINE in lines
    assert lines[-1] == "[saved] 100% to runs/debug"
    assert not re.search("\x1b|[━╸]", "".join(lines)), "no escapes and no bars in a log file"


def test_the_line_stands_on_a_terminal_too_beside_a_progress_bar():
    text = shown(tty=True)
    assert LINE in text
    assert "120/1000" in text.replace(LINE, "")


def test_what_is_not_known_and_what_is_added_keep_the_form():
    text = shown(tty=False, records=({**RECORD, "mfu": None, "loss": float("nan"), "validation_loss": 2.5},))
    assert "| loss nan |" in text
    assert "| MFU n/a |" in text
    assert "| ETA 3h12m | validation_loss 2.5000\n" in text


def test_the_start_shows_mesh_parameters_batch_arithmetic_and_precision():
    for tty in (False, True):
        text = shown(tty)
        for part in (
            "pp 1 × dp 2 × ep 1 × cp 1 × tp 2 = 4 ranks on cpu",
            "8,030,261,248 (8.03B), 4,015,130,624 on rank 0",
            "16 sequences = 2 replicas × 4 micro-batches × 2; × 64 tokens = 1,024 tokens a step",
            "compute bfloat16, masters float32",
            "1,000, resumed at step 11",
        ):
            assert part in " ".join(text.split()), part


def test_ranks_other_than_0_are_silent():
    assert shown(tty=False, rank=1) == ""
    assert shown(tty=True, rank=1) == ""


def test_lines_come_as_often_as_asked_and_for_the_last_step():
    records = [{**RECORD, "step": step} for step in (1, 2, 3, 999, 1000)]
    assert re.findall(r"step (\d+)/", shown(False, every=3, records=records)) == ["3", "999", "1000"]
    assert re.findall(r"step (\d+)/", shown(False, every=0, records=records)) == []


def test_numbers_never_overflow_their_unit():
    assert [count(n) for n in (0, 812, 12345, 999_949, 999_951, 8.03e9, 4.05e11, 1.5e13)] == [
        "0",
        "812",
        "12.3k",
        "999.9k",
        "1.0M",
        "8.03B",
        "405.00B",
        "15.00T",
    ]
    assert [size(n) for n in (0, 1023, 1024, 2**20 - 1, 2**33)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "8.0 GiB",
    ]
    assert [duration(s) for s in (-1, 0.4, 59.6, 3599.7, 11520, 86399, 183600)] == [
        "0s",
        "0s",
        "1m00s",
        "1h00m",
        "3h12m",
        "1d00h",
        "2d03h",
    ]


def test_resident_peak_is_above_what_was_held_and_given_back():
    before = peak_resident()
    block = torch.ones(1 << 26, dtype=torch.uint8)
    assert block[-1] == 1
    del block
    after = peak_memory(torch.device("cpu"))
    assert after.peak >= max(before, 1 << 26)
    assert after.peak < 1 << 38, "in bytes"
    assert after.allocated is after.reserved is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_allocated_and_reserved_peaks_are_read_on_a_gpu():
    block = torch.ones(1 << 26, dtype=torch.uint8, device="cuda")
    memory = peak_memory(block.device)
    assert memory.peak == memory.allocated >= 1 << 26
    assert memory.reserved >= memory.allocated


def test_flops_per_token_are_those_of_counting_every_product_of_a_small_transformer():
    hidden, heads, head_dim, ffn, vocab, layers, seq = 8, 4, 2, 24, 32, 3, 10
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn
    products = layers * (2 * per_layer + 2 * 2 * heads * head_dim * seq / 2) + 2 * hidden * vocab
    found = flops_per_token(layers * per_layer + hidden * vocab, layers * heads * 2 * head_dim, seq / 2)
    assert found == 3 * products


def test_mfu_of_a_published_run_comes_out_and_is_unknown_without_a_peak():
    # Llama 3 8B: 7.50 B matmul parameters (embedding left out), 32 layers of 32 heads of 128, 8192 tokens.
    flops = flops_per_token(7_504_924_672, 32 * 32 * 256, 8192 / 2)
    assert flops == pytest.approx(5.147e10, rel=1e-3)
    peak = peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert mfu(8 * 7000, flops, 8, peak) == pytest.approx(0.364, abs=1e-3)
    assert mfu(8 * 7000, flops, 8, None) is None


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("AMD Instinct MI300X", "bfloat16", 1307),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GeForce GT 710", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_peaks_are_those_of_the_very_device_or_unknown(name, dtype, tflops):
    assert peak_flops(name, dtype) == (None if tflops is None else tflops * 1e12)


def test_console_run_folder_and_flop_formula_need_no_torch():
    code = (
        "import sys; import ultrascale.observe.console, ultrascale.observe.run_folder, "
        "ultrascale.observe.mfu, "
        "ultrascale.observe.memory, ultrascale.checkpoint.manifest, ultrascale.checkpoint.folder; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
