"""llama.cpp itself, as xllamacpp has it: ids of a text, log-probabilities and greedy text of a GGUF file."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xllamacpp

F32 = 0  # ggml_type; without it, the cache is in float16


class LlamaCpp:
    def __init__(self, path: Path, rows: int, n_ctx: int) -> None:
        self.rows, parameters = rows, xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx = str(path), n_ctx
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type(F32)
        parameters.n_parallel, parameters.warmup, parameters.verbosity = 1, False, -1
        self._server = xllamacpp.Server(parameters)

    def _post(self, name: str, **body: Any) -> Any:
        address, headers = f"{self._server.listening_address}/{name}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as answer:
            return json.loads(answer.read())

    def ids(self, text: str, parse_special: bool, add_special: bool = False) -> list[int]:
        return self._post("tokenize", content=text, parse_special=parse_special, add_special=add_special)["tokens"]

    def _complete(self, ids: list[int], count: int, **more: Any) -> Any:
        return self._post(
            "completion", prompt=ids, n_predict=count, temperature=0.0, return_tokens=True, cache_prompt=False, **more
        )

    def scores(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities (V) of the next token."""
        # Without text, as of an end or of part of a character, there are no scores. The bias makes a line end the next
        # token, and is not in the scores.
        answer = self._complete(ids, 1, n_probs=self.rows, logit_bias=[[self.ids("\n", False)[0], 1e6]])
        found = np.full(self.rows, np.nan, np.float32)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return torch.from_numpy(found)

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], str]:
        """The next ids and their text. A token that ends generation is among the ids."""
        answer = self._complete(ids, count)
        return answer["tokens"], answer["content"]
