"""HTTP to servers that speak OpenAI's protocol: which of them it is, one completion, and its speculation counters.

vLLM and SGLang differ in where they count: vLLM in Prometheus counters of the whole server (`vllm:spec_decode_num_*` in
v1/spec_decode/metrics.py, 0.20), SGLang in each answer of `/generate` (`meta_info`: completion_tokens, spec_verify_ct;
srt/managers/tokenizer_manager.py, 0.5). Both take token ids, so a server answers the very prompt that was decoded here.
Retries are urllib3's. Used by `server_eval.py` and `regenerate.py`.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

Dialect = Literal["vllm", "sglang", "openai"]
_RETRIED = (408, 429, 500, 502, 503, 504)
_CONNECT_S = 10.0


class ServerError(RuntimeError):
    """A server did not do what it was asked; the message says which one and what it said."""


@dataclass(frozen=True)
class Counters:
    """Speculation counters, as they stand or as a difference.

    Attributes:
        drafts: verifications. accepted: draft tokens accepted in them.
        per_position: accepted at position 1.. of the block; empty where the server does not say.
        generated: tokens that the server generated for anybody; None where it does not say.
    """

    drafts: float = 0
    accepted: float = 0
    per_position: tuple[float, ...] = ()
    generated: float | None = None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, bonus token included."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`.

        Raises:
            ServerError: a counter went back: the server was started again.
        """
        pairs = zip(self.per_position, before.per_position or (0.0,) * len(self.per_position), strict=False)
        generated = None
        if self.generated is not None and before.generated is not None:
            generated = self.generated - before.generated
        found = Counters(
            self.drafts - before.drafts, self.accepted - before.accepted, tuple(a - b for a, b in pairs), generated
        )
        if min(found.drafts, found.accepted, found.generated or 0) < 0:
            raise ServerError("the server's counters went back during the measurement: it was started again")
        return found

    def __add__(self, other: "Counters") -> "Counters":
        longer, shorter = sorted((self.per_position, other.per_position), key=len, reverse=True)
        per_position = tuple(a + (shorter[i] if i < len(shorter) else 0) for i, a in enumerate(longer))
        known = [each.generated for each in (self, other) if each.generated is not None]
        generated = sum(known) if known else None
        return Counters(self.drafts + other.drafts, self.accepted + other.accepted, per_position, generated)


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        counters: of this answer alone; None where only the whole server counts.
        token_ids, prompt_token_ids: None where the server does not give them.
    """

    text: str
    num_tokens: int
    finish_reason: str | None
    counters: Counters | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    message: dict[str, Any] = field(default_factory=dict)


class Server:
    """One server. May be used by several threads.

    Args:
        url: with or without /v1.
        api_key: sent as a bearer token.
        retries: of a request that was not answered, or answered with 408, 429 or 5xx, with growing pauses.
        timeout_s: for an answer.

    Raises:
        ServerError: it cannot be reached, or serves no model, or not `model`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        retries: int = 5,
        timeout_s: float = 600.0,
        model: str | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"a server's URL must begin with http:// or https://; found {url!r}")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._retries, self._timeout = retries, (_CONNECT_S, timeout_s)
        self._local = threading.local()
        models = [str(each.get("id")) for each in self._json("GET", "/v1/models", retries=1).get("data", [])]
        if not models or (model is not None and model not in models):
            raise ServerError(f"{self.url} must serve {model or 'a model'}; found {models or 'none'}")
        self.model = model or models[0]
        self.dialect: Dialect = self._find_dialect()

    def _find_dialect(self) -> Dialect:
        if self._answers("/get_server_info") or self._answers("/server_info"):
            return "sglang"
        metrics = self._session(0).get(f"{self.url}/metrics", headers=self._headers, timeout=self._timeout)
        return "vllm" if metrics.ok and "vllm:" in metrics.text else "openai"

    def _answers(self, path: str) -> bool:
        response = self._session(0).get(f"{self.url}{path}", headers=self._headers, timeout=self._timeout)
        return response.ok and "internal_states" in response.text

    def _session(self, retries: int) -> requests.Session:
        sessions: dict[int, requests.Session] = self._local.__dict__.setdefault("sessions", {})
        if retries not in sessions:
            policy = Retry(
                total=retries, backoff_factor=0.5, backoff_max=30, status_forcelist=_RETRIED, allowed_methods=None
            )
            session = sessions[retries] = requests.Session()
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=policy))
        return sessions[retries]

    def _json(self, method: str, path: str, body: Any = None, *, retries: int | None = None) -> dict[str, Any]:
        try:
            response = self._session(self._retries if retries is None else retries).request(
                method, f"{self.url}{path}", json=body, headers=self._headers, timeout=self._timeout
            )
        except requests.RequestException as error:
            raise ServerError(f"{self.url}{path} cannot be reached: {error}") from error
        if not response.ok:
            raise ServerError(f"{self.url}{path} answered {response.status_code}: {response.text[:300]}")
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerError(f"{self.url}{path} must answer JSON; found {response.text[:100]!r}") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{path} must answer an object; found {type(answer).__name__}")
        return answer

    def complete(self, prompt: list[int], *, max_new_tokens: int, temperature: float, seed: int | None) -> Completion:
        """Continue token ids, to the end token or max_new_tokens."""
        if self.dialect == "sglang":
            sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
            answer = self._json("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling})
            return _sglang_completion(answer, self.url)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_new_tokens, "temperature": temperature}
        answer = self._json("POST", "/v1/completions", body | ({} if seed is None else {"seed": seed}))
        choice, usage = _choice(answer, self.url)
        return Completion(str(choice.get("text", "")), usage, choice.get("finish_reason"))

    def chat(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None, max_tokens: int, sampling: dict[str, Any]
    ) -> Completion:
        """Answer a conversation. vLLM is asked for token ids."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens, **sampling}
        if tools:
            body["tools"] = tools
        if self.dialect == "vllm":
            body["return_token_ids"] = True
        answer = self._json("POST", "/v1/chat/completions", body)
        choice, usage = _choice(answer, self.url)
        message = choice.get("message") or {}
        return Completion(
            str(message.get("content") or ""),
            usage,
            choice.get("finish_reason"),
            token_ids=_ids(choice.get("token_ids")),
            prompt_token_ids=_ids(answer.get("prompt_token_ids")),
            message=dict(message),
        )

    def counters(self) -> Counters | None:
        """The whole server's counters; None where it has none of speculation.

        Raises:
            ServerError: /metrics cannot be read.
        """
        from prometheus_client.parser import text_string_to_metric_families

        response = self._session(1).get(f"{self.url}/metrics", headers=self._headers, timeout=self._timeout)
        if not response.ok:
            raise ServerError(f"{self.url}/metrics answered {response.status_code}: start the server with its metrics")
        sums: dict[str, float] = {}
        per_position: dict[int, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                    position = int(sample.labels["position"])
                    per_position[position] = per_position.get(position, 0) + sample.value
                elif not sample.name.endswith(("_created", "_bucket")):
                    sums[name] = sums.get(name, 0) + sample.value  # over engines
        if "vllm:spec_decode_num_drafts" not in sums:
            return None
        return Counters(
            drafts=sums["vllm:spec_decode_num_drafts"],
            accepted=sums.get("vllm:spec_decode_num_accepted_tokens", 0),
            per_position=tuple(per_position[position] for position in sorted(per_position)),
            generated=sums.get("vllm:generation_tokens"),
        )


def _choice(answer: dict[str, Any], url: str) -> tuple[dict[str, Any], int]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerError(f"{url} must answer one choice; found {str(answer)[:200]}")
    return choices[0], int((answer.get("usage") or {}).get("completion_tokens") or 0)


def _ids(values: Any) -> tuple[int, ...] | None:
    return tuple(int(value) for value in values) if isinstance(values, list) else None


def _sglang_completion(answer: dict[str, Any], url: str) -> Completion:
    meta = answer.get("meta_info")
    if not isinstance(meta, dict) or "completion_tokens" not in meta:
        raise ServerError(f"{url}/generate must answer with meta_info; found {str(answer)[:200]}")
    tokens, verified = int(meta["completion_tokens"]), meta.get("spec_verify_ct")
    counters = None
    if verified is not None:
        # The first token comes from the prefill. A verification yields its accepted drafts and the bonus token.
        counters = Counters(drafts=int(verified), accepted=max(0, tokens - 1 - int(verified)), generated=tokens)
    reason = meta.get("finish_reason")
    return Completion(
        str(answer.get("text", "")),
        tokens,
        reason.get("type") if isinstance(reason, dict) else reason,
        counters=counters,
        token_ids=_ids(answer.get("output_ids")),
    )
