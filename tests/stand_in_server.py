"""A server that speaks vLLM's or SGLang's dialect of OpenAI's protocol, with a drafter of known acceptance, and faults.

Answers are a function of the prompt alone, so that whoever asks twice gets the same. In a thread of the test's process.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACCEPTED = (3, 0, 1, 2)  # drafts accepted in successive verifications, cyclically
BLOCK = 4


@dataclass
class StandIn:
    """What the server does, and what it has seen.

    Attributes:
        drafter: it has one. metrics: it publishes its counters.
        faults: by number of the request that generates (from 0): a status, "drop", "slow" or "garbage".
        max_tokens: longest answer. token_ids: chat answers carry them (vLLM, when asked).
    """

    dialect: str = "vllm"
    drafter: bool = True
    metrics: bool = True
    model: str = "stand-in"
    faults: dict[int, Any] = field(default_factory=dict)
    max_tokens: int = 40
    delay_s: float = 0.0
    token_ids: bool = True
    foreign_tokens: int = 0  # of somebody else's requests, added with each of ours

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.served: Counter[str] = Counter()  # prompts as JSON -> answers given
        self.drafts = self.accepted = self.generated = 0
        self.per_position = [0] * (BLOCK - 1)
        self.at_once = self.most_at_once = 0
        self.url = ""

    def verify(self, num_tokens: int) -> int:
        """Count the verifications of an answer; return how many."""
        left, count = num_tokens - 1, 0
        while left > 0:
            accepted = min(ACCEPTED[count % len(ACCEPTED)], left - 1)
            left -= accepted + 1
            count += 1
            self.accepted += accepted
            for position in range(accepted):
                self.per_position[position] += 1
        self.drafts += count
        return count

    def prometheus(self) -> str:
        """Counters of two engines; both are to be summed."""
        lines = ["# TYPE vllm:generation_tokens counter"]
        lines += [f'vllm:generation_tokens_total{{engine="{i}"}} {self.generated / 2}' for i in (0, 1)]
        if self.drafter:
            for name, value in (
                ("drafts", self.drafts),
                ("draft_tokens", self.drafts * 3),
                ("accepted_tokens", self.accepted),
            ):
                lines.append(f"# TYPE vllm:spec_decode_num_{name} counter")
                lines += [f'vllm:spec_decode_num_{name}_total{{engine="{i}"}} {value / 2}' for i in (0, 1)]
            lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
            for position, value in enumerate(self.per_position):
                lines.append(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{position}"}} {value}'
                )
        return "\n".join(lines) + "\n"

    def answer_tokens(self, prompt: Any) -> int:
        """Length of the answer to a prompt."""
        return 10 + len(json.dumps(prompt)) % 30


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": state.model}]})
        elif self.path == "/metrics" and state.dialect == "vllm" and state.metrics:
            self._send(200, state.prometheus())
        elif self.path == "/get_server_info" and state.dialect == "sglang":
            self._send(200, {"internal_states": [{"avg_spec_accept_length": 1.0}]})
        else:
            self._send(404, {"error": "no such path"})

    def do_POST(self) -> None:
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            number = len(state.requests)
            state.requests.append({"path": self.path, "body": body, "auth": self.headers.get("Authorization")})
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        try:
            self._generate(number, body)
        finally:
            with state.lock:
                state.at_once -= 1

    def _generate(self, number: int, body: dict[str, Any]) -> None:
        state, fault = self.state, self.state.faults.get(number)
        if state.delay_s:
            time.sleep(state.delay_s)
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "garbage":
            self._send(200, "<html>not JSON</html>")
            return
        if isinstance(fault, int):
            self._send(fault, {"error": "planted"}, {"Retry-After": "0"})
            return
        prompt = body.get("messages") or body.get("prompt") or body.get("input_ids")
        limit = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        wanted = state.answer_tokens(prompt)
        tokens = min(wanted, limit, state.max_tokens)
        reason = "stop" if tokens == wanted else "length"
        with state.lock:
            state.served[json.dumps(prompt)] += 1
            verified = state.verify(tokens) if state.drafter else 0
            state.generated += tokens + state.foreign_tokens
        text = f"answer to {json.dumps(prompt)[-60:]}"
        usage = {"completion_tokens": tokens}
        if self.path == "/generate" and state.dialect == "sglang":
            meta: dict[str, Any] = {"completion_tokens": tokens, "finish_reason": {"type": reason}}
            if state.drafter:
                meta["spec_verify_ct"] = verified
            self._send(200, {"text": text, "output_ids": list(range(tokens)), "meta_info": meta})
        elif self.path == "/v1/completions":
            self._send(200, {"choices": [{"text": text, "finish_reason": reason}], "usage": usage})
        elif self.path == "/v1/chat/completions":
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
            answer: dict[str, Any] = {"choices": [choice], "usage": usage}
            if body.get("return_token_ids") and state.token_ids:
                choice["token_ids"] = list(range(100, 100 + tokens))
                answer["prompt_token_ids"] = list(range(1, 8))
            self._send(200, answer)
        else:
            self._send(404, {"error": "no such path"})

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(**options: Any) -> Iterator[StandIn]:
    """A running stand-in; `url` says where."""
    state = StandIn(**options)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
