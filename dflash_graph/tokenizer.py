"""The target's own tokenizer: its loading, and what tells it from another one.

Called by data.py and by whoever turns text into tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from dflash_graph.config_groups import TargetConfig


def load_tokenizer(target: TargetConfig) -> Any:
    """The target's own tokenizer (transformers), GGUF files included.

    Raises:
        ValueError: nothing that transformers can load stands at `target.path`.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    if target.gguf_file is not None:
        if Path(target.path).is_dir() and not (Path(target.path) / target.gguf_file).is_file():
            raise ValueError(f"target.gguf_file must be a file of {target.path}; found no {target.gguf_file!r} there")
        options["gguf_file"] = target.gguf_file
    try:
        return AutoTokenizer.from_pretrained(target.path, **{k: v for k, v in options.items() if v is not None})
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load a tokenizer from target.path = {target.path!r}, which must be a local model folder or a hub "
            f"id (with target.gguf_file for GGUF): {error}"
        ) from error


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Everything of a tokenizer that decides about tokens, as plain values for a fingerprint."""
    identity: dict[str, Any] = {"special": tokenizer.special_tokens_map}
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # A tokenizer remembers the padding and truncation of its last call; rows use neither.
        return identity | {"backend": {k: v for k, v in backend.items() if k not in ("padding", "truncation")}}
    identity |= {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    identity["added"] = {str(i): repr(token) for i, token in tokenizer.added_tokens_decoder.items()}
    vocab_file = getattr(tokenizer, "vocab_file", None)
    if vocab_file and Path(vocab_file).is_file():
        identity["vocab_file"] = hashlib.sha256(Path(vocab_file).read_bytes()).hexdigest()
    return identity
