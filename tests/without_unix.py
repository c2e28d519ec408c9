"""Import every module of hfgpt, train 3 steps and resume, where what only Unix has is missing.

    python tests/without_unix.py FOLDER [PIECE ...]

PIECE is a name in PIECES; all of them by default. The libraries that hfgpt stands on are imported before, with all of
Unix: on Windows they have ways of their own.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import pkgutil
import signal
import sys
from pathlib import Path

MODULES = ("resource", "fcntl", "pwd", "grp", "termios", "pty", "tty", "syslog", "_posixsubprocess")
SIGNALS = ("SIGKILL", "SIGHUP", "SIGCHLD", "SIGALRM", "SIGPIPE", "SIGUSR1", "SIGSTOP", "SIGCONT", "SIGQUIT")


def forbid_imports(*names: str) -> None:
    """Importing these from hfgpt fails; elsewhere it does not."""
    real = builtins.__import__, importlib.import_module

    def check(name: str, importer: str) -> None:
        if name.split(".")[0] in names and importer.split(".")[0] == "hfgpt":
            raise ModuleNotFoundError(f"No module named {name!r}")

    def checked_import(name, globals=None, locals=None, fromlist=(), level=0):
        check(name if not level else "", (globals or {}).get("__name__", ""))
        return real[0](name, globals, locals, fromlist, level)

    def checked_import_module(name, package=None):
        check(name, sys._getframe(1).f_globals.get("__name__", ""))
        return real[1](name, package)

    builtins.__import__, importlib.import_module = checked_import, checked_import_module


def remove(module, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def remove_libc() -> None:
    real = ctypes.CDLL

    def load(name, *arguments, **options):
        if name in (None, "libc.so.6"):
            raise OSError(f"{name}: cannot open shared object file")
        return real(name, *arguments, **options)

    ctypes.CDLL = load


def refuse_links() -> None:
    def refuse(*_, **__):
        raise OSError(1314, "A required privilege is not held by the client")

    Path.symlink_to = os.symlink = refuse


def refuse_folders() -> None:
    """As Windows: a folder cannot be opened, and a file that is open for reading alone cannot be synced."""
    if os.name == "nt":
        return
    import fcntl

    real_open, real_sync = os.open, os.fsync

    def open_file(path, flags, *arguments, **options):
        if os.path.isdir(path) and "dir_fd" not in options and str(path).startswith(str(FOLDER)):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *arguments, **options)

    def sync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        real_sync(descriptor)

    os.open, os.fsync = open_file, sync


PIECES = {
    "resource": lambda: forbid_imports("resource"),
    "fcntl": lambda: forbid_imports("fcntl"),
    "libc": remove_libc,
    "affinity": lambda: (remove(os, "sched_getaffinity"), remove(psutil.Process, "cpu_affinity")),
    "links": refuse_links,
    "folders": refuse_folders,
    "signals": lambda: remove(signal, *SIGNALS, "setitimer", "alarm", "pthread_sigmask"),
    "processes": lambda: remove(os, "fork", "forkpty", "killpg", "setsid", "getpgid"),
    "files": lambda: remove(os, "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "mkfifo", "geteuid", "getuid", "statvfs"),
    "sysconf": lambda: remove(os, "sysconf", "getloadavg", "uname"),
    "modules": lambda: forbid_imports(*MODULES),
}


def settings(**changes):
    from hfgpt import PretrainConfig

    model = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_positions": 32}
    fixed = {"dataset": str(FOLDER / "text.jsonl"), "tokenizer": "bpe-300", "sequence_length": 16, "eval_steps": 0}
    fixed |= {"output_dir": str(FOLDER / "run"), "mixed_precision": "no", "torch_compile": False, "optim": "adamw"}
    fixed |= {"save_total_limit": 1, "mfu_peak_tflops": 1, "per_device_train_batch_size": 2, "streaming": True}
    return PretrainConfig(model=model, dataloader_num_workers=0, **{**fixed, **changes})


def main() -> None:
    texts = [f"document {n} says {n * n % 101}: für {n % 7}" for n in range(200)]
    text = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    (FOLDER / "text.jsonl").write_text(text, encoding="utf-8", newline="\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "hfgpt"]:
        del sys.modules[name]
    for piece in sys.argv[2:] or PIECES:
        PIECES[piece]()
    import hfgpt

    count = 0
    for module in pkgutil.walk_packages(hfgpt.__path__, "hfgpt."):
        if not module.name.endswith(("__main__", "load_with_transformers")):  # scripts
            importlib.import_module(module.name)
            count += 1
    from hfgpt import Pretrainer

    Pretrainer(settings(max_steps=3, save_steps=2)).train()
    resumed = Pretrainer(settings(max_steps=4, resume_from_checkpoint="latest"))
    resumed.train()
    again = Pretrainer(settings(max_steps=5, resume_from_checkpoint=str(FOLDER / "run" / "checkpoint-latest")))
    again.train()
    steps = [json.loads(line)["step"] for line in (FOLDER / "run" / "ledger.jsonl").read_bytes().splitlines()]
    (FOLDER / "found.json").write_text(json.dumps({"modules": count, "steps": steps}), encoding="utf-8")


if __name__ == "__main__":
    # What hfgpt stands on.
    import datasets  # noqa: F401
    import psutil
    import torch
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers import GPT2Config, PreTrainedModel, Trainer  # noqa: F401

    FOLDER = Path(sys.argv[1]).resolve()
    main()
