"""The automatic choices, on machines described by what the probes return."""

import contextlib
import sysconfig

import pytest
import torch
from running import same_weights, trained

from hfgpt.distributed import compiler, cpu, device
from hfgpt.errors import RunError, UserError
from hfgpt.training.step import TrainStep

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def cuda_unreachable(monkeypatch):
    def raises(*args, **kwargs):
        raise AssertionError("torch.cuda was asked on a CPU run")

    names = (
        "is_available is_bf16_supported get_device_properties get_device_name current_device device_count "
        "get_device_capability mem_get_info synchronize init"
    )
    for name in names.split():
        monkeypatch.setattr(torch.cuda, name, raises)


def probe(monkeypatch, *, cpu_flags: str = "", cuda_bf16: bool = False) -> None:
    monkeypatch.setattr(cpu, "cpuinfo", lambda key: cpu_flags if key == "flags" else "")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: cuda_bf16)
    monkeypatch.setattr(torch.cuda, "device", lambda which: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "Tesla T4")


@pytest.mark.parametrize(
    ("where", "probes", "name"),
    [
        (CUDA, {"cuda_bf16": True}, "bf16"),
        (CUDA, {"cuda_bf16": False}, "fp16"),
        (CPU, {"cpu_flags": "sse avx512_bf16 avx2"}, "bf16"),
        (CPU, {"cpu_flags": "amx_bf16"}, "bf16"),
        (CPU, {"cpu_flags": "sse avx512f"}, "no"),
        (CPU, {"cpu_flags": ""}, "no"),
    ],
)
def test_auto_precision(monkeypatch, where, probes, name):
    probe(monkeypatch, **probes)
    choice = device.choose_precision("auto", where)
    assert choice.name == name and choice.reason


def test_arm_says_features(monkeypatch):
    monkeypatch.setattr(cpu, "cpuinfo", lambda key: "asimd bf16" if key == "Features" else "")
    assert device.choose_precision("auto", CPU).name == "bf16"


def test_the_accelerate_configuration_wins_over_auto_only(monkeypatch):
    probe(monkeypatch, cuda_bf16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    chosen = device.choose_precision("auto", CUDA)
    assert chosen.name == "fp16" and chosen.reason.startswith("from the accelerate configuration")
    assert device.choose_precision("no", CUDA).name == "no"
    with pytest.raises(UserError, match=r"accelerate configuration.*cpu"):
        device.choose_precision("auto", CPU)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert device.choose_precision("auto", CUDA).name == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="fp8"):
        device.choose_precision("auto", CUDA)


def test_precision_that_cannot_work_is_refused(monkeypatch):
    probe(monkeypatch)
    with pytest.raises(UserError, match=r"fp16 .*cpu"):
        device.choose_precision("fp16", CPU)
    with pytest.raises(UserError, match="Tesla T4 has no bf16; use fp16"):
        device.choose_precision("bf16", CUDA)
    with pytest.raises(UserError, match=r"fp32.*auto, bf16, fp16, no"):
        device.choose_precision("fp32", CPU)
    assert "float32 would be faster" in device.choose_precision("bf16", CPU).reason


def test_a_cpu_run_never_asks_cuda(cuda_unreachable):
    for requested in ("auto", "bf16", "no"):
        device.choose_precision(requested, CPU)
    with pytest.raises(UserError):
        device.choose_precision("fp16", CPU)
    compiler.choose_compile("auto", CPU, 10_000)
    device.synchronize(CPU)
    assert device.device_name(CPU)
    assert device.memory_bytes(CPU) > 2**27
    assert cpu.use_all_cores(1) >= 1


def test_the_accelerate_configuration_can_ask_for_the_cpu(monkeypatch, cuda_unreachable):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: CUDA)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert device.default_device() == CUDA
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert device.default_device() == CPU
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert device.default_device() == CUDA


@pytest.fixture
def with_compiler(monkeypatch, tmp_path):
    """A machine with g++ and Python.h, whatever this one has."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "g++" else None)
    return tmp_path


def test_auto_compile_needs_a_compiler_and_a_long_run(with_compiler, monkeypatch):
    assert compiler.choose_compile("auto", CPU, 200).enabled
    short = compiler.choose_compile("auto", CPU, 199)
    assert not short.enabled and "199" in short.reason
    assert "as few as 199 forward" in compiler.choose_compile("auto", CPU, 199, is_least=True).reason
    assert compiler.choose_compile(True, CPU, 1).enabled
    assert not compiler.choose_compile(False, CPU, 10_000).enabled

    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = compiler.choose_compile("auto", CPU, 10_000)
    assert not missing.enabled and "no-such-compiler" in missing.reason
    with pytest.raises(UserError, match=r"no-such-compiler.*auto or false"):
        compiler.choose_compile(True, CPU, 10_000)
    assert not compiler.choose_compile(False, CPU, 10_000).enabled


def test_auto_compile_needs_pythons_headers(with_compiler):
    (with_compiler / "Python.h").unlink()
    choice = compiler.choose_compile("auto", CPU, 10_000)
    assert not choice.enabled and "Python.h" in choice.reason


def test_auto_compile_off_where_torch_cannot(with_compiler, monkeypatch):
    def unsupported():
        raise RuntimeError("Python 4 not yet supported for torch.compile")

    monkeypatch.setattr("torch._dynamo.eval_frame.check_if_dynamo_supported", unsupported)
    choice = compiler.choose_compile("auto", CPU, 10_000)
    assert not choice.enabled and "Python 4" in choice.reason


def test_auto_compile_on_cuda(with_compiler, monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (8, 9))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert "triton" in compiler.choose_compile("auto", CUDA, 10).reason
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: object())
    assert compiler.choose_compile("auto", CUDA, 10).enabled
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (6, 1))
    assert "6.1" in compiler.choose_compile("auto", CUDA, 10).reason


def broken_file(folder, name):
    (folder / "x1").mkdir(exist_ok=True)
    file = folder / "x1" / f"{name}.main.so"
    file.write_bytes(b"")
    return file, type("InductorError", (Exception,), {})(f"ImportError: {file}: file too short")


def test_broken_compiled_code_is_removed_and_compiled_again(tmp_path, config, monkeypatch, caplog):
    """In a step, half of whose gradients there are already, and in an evaluation: the run is as any other."""
    whole = trained(config("whole", eval_steps=3))
    (first, in_step), (second, in_evaluation) = broken_file(tmp_path, "c4"), broken_file(tmp_path, "c5")
    model = type(whole.step.model)
    take, plain = TrainStep.__call__, model.forward

    def failing_step(self, ids, labels, step, *args):
        if first.exists() and step == 2:
            self.parallel_model(input_ids=ids, shift_labels=labels).loss.backward()
            raise in_step
        return take(self, ids, labels, step, *args)

    def failing_forward(self, *args, **kwargs):
        if second.exists() and not self.training:
            raise in_evaluation
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(TrainStep, "__call__", failing_step)
    monkeypatch.setattr(model, "forward", failing_forward)
    mended = trained(config("mended", eval_steps=3))
    assert mended.progress.evaluation["eval_loss"] == whole.progress.evaluation["eval_loss"]
    assert same_weights(mended, whole)
    assert not first.exists() and not second.exists()
    assert sum("removed a corrupt file" in message for message in caplog.messages) == 2


def test_a_compiler_error_names_its_cause_and_fix(tmp_path, config, monkeypatch):
    """A file that is broken again, and any other fault of it."""
    _, again = broken_file(tmp_path, "c6")
    other = type("BackendCompilerFailed", (Exception,), {})(
        "backend='inductor' raised:\nCppCompileError: C++ compile error"
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/the/cache")
    for error, expected in (again, "c6.main.so: file too short"), (other, "CppCompileError: C.. compile error"):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(TrainStep, "__call__", fails)
        way = "remove /the/cache, .* --torch_compile false; ended after step 0; no checkpoint has been written"
        with pytest.raises(RunError, match=rf"torch.compile failed \(.*{expected}\); .*{way}"):
            trained(config(expected[:2]))
