"""Peak memory and time of head and loss, forward and backward: python tests/benchmarks/lm_head_memory.py

B * T = 4,096 tokens, 768 wide, 50,257 entries. Each form is a process of its own; its peak is counted from what is held
before. Ours are those of training: compiled with the model, and in chunks where a model is not compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from side_by_side import keep, machine, parser, use_cores

N, C, V = 4096, 768, 50_257
PLAIN = "float32 logits, cross_entropy"
FORMS = (PLAIN, "ours, compiled, bf16", "ours, compiled, float32", "ours, chunks, bf16", "ours, chunks, float32")


def measure(form: str) -> dict[str, float]:
    import torch

    from hfgpt.distributed.device import default_device, peak_memory_bytes, reset_peak_memory, synchronize
    from hfgpt.model.head_loss import HEAD_CHUNK_SIZE, head_loss

    device = default_device()
    x_NC = torch.randn(N, C, device=device, requires_grad=True)
    weight_VC = (0.02 * torch.randn(V, C, device=device)).requires_grad_()
    target_N = torch.randint(V, (N,), device=device)

    def plain(x, weight, target, chunk):
        return torch.nn.functional.cross_entropy(x @ weight.t(), target, reduction="sum")

    head = plain if form == PLAIN else torch.compile(head_loss, dynamic=False) if "compiled" in form else head_loss

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in form):
            loss = head(x_NC, weight_VC, target_N, HEAD_CHUNK_SIZE if "chunks" in form else None)
        loss.backward()

    step()  # compiles; its gradients stay, so that they are held before
    x_NC.grad.zero_(), weight_VC.grad.zero_()
    reset_peak_memory(device)
    before = resident() if device.type == "cpu" else torch.cuda.memory_allocated()
    start = time.perf_counter()
    step()
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = high_water() if device.type == "cpu" else peak_memory_bytes(device)
    return {"mib": (peak - before) / 2**20, "seconds": seconds}


def resident() -> int:
    return status("VmRSS")


def high_water() -> int:
    return status("VmHWM")


def status(key: str) -> int:
    """Bytes of an entry of Linux's account of this process."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--form", help="(the other end)")
    given = options.parse_args()
    if given.form:
        return print("RESULT", json.dumps(measure(given.form)))
    use_cores(given.threads)
    facts, found = machine(given.threads), {}
    for form in FORMS:
        done = subprocess.run([sys.executable, __file__, "--form", form], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(done.stderr)
        found[form] = json.loads(lines[-1].removeprefix("RESULT "))
        share = found[form]["mib"] / found[PLAIN]["mib"]
        print(f"  {form:32} {found[form]['mib']:8,.0f} MiB ({share:.0%})  {found[form]['seconds']:.2f} s", flush=True)
    keep("lm_head_memory", facts, found)


if __name__ == "__main__":
    main()
