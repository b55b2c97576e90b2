"""Messages of any common spelling in one form: role, content, reasoning, tool calls; and the order that they may have.

Owns OpenAI's and ShareGPT's ways to write a conversation. A message in the common form has `role` (system, developer,
user, assistant, tool) and `content` (text), and where there is any `reasoning_content`, `tool_calls` (each with
`function.arguments` as an object), `tool_call_id` and `name`. Several text parts are joined by newlines, as vLLM joins
them for templates that take text. Whatever cannot be said in this form is an error with a named reason. Called by
row_shapes.py; knows no tokenizer and no template.
"""

from typing import Any

from dflash_graph.row_values import RowError, checked_text, checked_value, load_json, shown

Message = dict[str, Any]

LEADING_ROLES = ("system", "developer")
_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "ipython", "tool_response", "observation"), "tool"),
}
_CALL_ROLES = ("function_call", "tool_call")  # ShareGPT: the value is the call, as JSON
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("image", "audio", "video", "file")


def parse_messages(turns: Any, *, drop_nulls: bool) -> tuple[list[Message], frozenset[int]]:
    """The messages in the common form, and the indices of assistant messages that are not to be supervised.

    Args:
        drop_nulls: see `checked_value`; for arguments of tool calls.

    Raises:
        RowError: `turns` is no list of messages that have a role and text.
    """
    if not isinstance(turns, (list, tuple)):
        raise RowError("messages_not_a_list", f"found {type(turns).__name__}")
    if not turns:
        raise RowError("empty_conversation")
    messages, unsupervised = [], set()
    for i, turn in enumerate(turns):
        message = _parse_message(turn, drop_nulls)
        if message["role"] == "assistant" and not _is_supervised(turn):
            unsupervised.add(i)
        messages.append(message)
    return messages, frozenset(unsupervised)


def check_order(messages: list[Message], *, answered: bool) -> None:
    """System and developer messages lead, a user begins, tool results follow calls; the rest is the template's say.

    Args:
        answered: there must be an assistant message.

    Raises:
        RowError: the order is another one.
    """
    start = next((i for i, m in enumerate(messages) if m["role"] not in LEADING_ROLES), len(messages))
    if start == len(messages):
        raise RowError("system_only")
    previous: Message = {"role": "system"}
    for message in messages[start:]:
        role, before = message["role"], previous["role"]
        calls = bool(previous.get("tool_calls"))
        fits = {
            "user": before in ("system", "tool") or (before == "assistant" and not calls),
            "assistant": before in ("user", "tool") or (before == "assistant" and not calls),
            "tool": before == "tool" or calls,
        }
        if not fits.get(role, False):
            raise RowError("roles_out_of_order", ", ".join(m["role"] for m in messages[:8]))
        previous = message
    if answered and all(message["role"] != "assistant" for message in messages):
        raise RowError("no_assistant_turn")


def with_system(messages: list[Message], system: Any) -> tuple[list[Message], int]:
    """The messages with a row's `system` column in front of them, and how many messages that added.

    Raises:
        RowError: the column is no text, or says something else than the conversation's own system message.
    """
    if system is None or system == "":
        return messages, 0
    if not isinstance(system, str):
        raise RowError("content_not_text", f"the column `system` is {type(system).__name__}")
    if messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise RowError("two_system_prompts", "the column `system` differs from the system message")
        return messages, 0
    return [{"role": "system", "content": checked_text(system)}, *messages], 1


def parse_tools(tools: Any, *, drop_nulls: bool) -> list[dict[str, Any]] | None:
    """Declared tools, each as {"type": "function", "function": {...}}; None if there are none.

    Args:
        tools: a list of declarations or its JSON; a declaration may be bare ({"name": ..., "parameters": ...}).

    Raises:
        RowError: it is no such list.
    """
    if isinstance(tools, str):
        tools = load_json(tools) if tools.strip() else None
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RowError("tools_not_a_list", f"found {type(tools).__name__}")
    found = []
    for tool in tools:
        if isinstance(tool, str):
            tool = load_json(tool)
        if not isinstance(tool, dict):
            raise RowError("broken_tool", f"a declaration is {type(tool).__name__}")
        tool = checked_value(tool, drop_nulls=drop_nulls)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("broken_tool", "a declaration without a name")
        found.append(tool if "function" in tool else {"type": "function", "function": tool})
    return found or None


def _parse_message(turn: Any, drop_nulls: bool) -> Message:
    if not isinstance(turn, dict):
        raise RowError("message_not_an_object", f"found {type(turn).__name__}")
    name = turn.get("role") if turn.get("role") is not None else turn.get("from")
    spelled = name.strip().lower() if isinstance(name, str) else ""
    role = _ROLES.get(spelled)
    if role is None:
        raise RowError("unknown_role", f"role {shown(name)}")
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    calls = _parse_calls(turn.get("tool_calls"), drop_nulls)
    if turn.get("function_call"):
        calls += _parse_calls([turn["function_call"]], drop_nulls)
    if spelled in _CALL_ROLES and isinstance(content, str):
        calls += _calls_of_text(content, drop_nulls)
        content = None
    if calls and role != "assistant":
        raise RowError("broken_tool_call", f"role {spelled!r} calls a tool")
    reasoning = _reasoning(turn)
    if isinstance(content, (list, tuple)):
        content, thoughts = _join_parts(content)
        reasoning = reasoning or thoughts
    if content is None:
        if not calls:
            raise RowError("null_content", f"role {spelled!r}")
        content = ""
    if media := next((key for key in turn if str(key).removesuffix("s") in _MEDIA[:3] and turn[key]), None):
        raise RowError("media", f"role {spelled!r} has {media} beside its text")
    if not isinstance(content, str):
        raise RowError("content_not_text", f"content of role {spelled!r} is {type(content).__name__}")
    message: Message = {"role": role, "content": checked_text(content)}
    if role == "assistant":
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if not (content.strip() or calls or reasoning.strip()):
            raise RowError("empty_answer", "an assistant message without content, reasoning or tool calls")
    for key in ("tool_call_id", "name"):
        if isinstance(turn.get(key), str):
            message[key] = checked_text(turn[key])
    return message


def _reasoning(turn: dict[str, Any]) -> str:
    values = [turn[key] for key in _REASONING_KEYS if turn.get(key)]
    if not all(isinstance(value, str) for value in values):
        raise RowError("reasoning_not_text", ", ".join(map(shown, values)))
    found = set(values)
    if len(found) > 1:
        raise RowError("two_reasonings", f"several of {', '.join(_REASONING_KEYS)} with different text")
    return checked_text(found.pop()) if found else ""


def _join_parts(parts: Any) -> tuple[str, str]:
    """Text parts in order, joined; and thinking parts."""
    texts, thoughts = [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise RowError("content_not_text", f"a part is {type(part).__name__}")
        kind = part.get("type")
        named = kind if isinstance(kind, str) else ""
        if media := next(
            (m for m in _MEDIA if m in named or any(str(k).startswith(m) and part[k] for k in part)), None
        ):
            raise RowError(f"{media}_part", "only text can be trained on")
        if named in ("text", "input_text", "output_text", "") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif named == "thinking" and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        else:
            raise RowError("unknown_part", f"a part of type {shown(kind)}")
    return "\n".join(texts), checked_text("\n".join(thoughts))


def _calls_of_text(text: str, drop_nulls: bool) -> list[dict[str, Any]]:
    try:
        value = load_json(text)
    except RowError as error:
        raise RowError("broken_tool_call", str(error)) from None
    calls = _parse_calls(value if isinstance(value, list) else [value], drop_nulls)
    if not calls:
        raise RowError("broken_tool_call", "a function call that calls nothing")
    return calls


def _parse_calls(calls: Any, drop_nulls: bool) -> list[dict[str, Any]]:
    if isinstance(calls, str):
        calls = load_json(calls) if calls.strip() else None
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)):
        raise RowError("broken_tool_call", f"tool_calls is {type(calls).__name__}")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) and call.get("function") is not None else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("broken_tool_call", "a call without a function's name")
        arguments = function["arguments"] if function.get("arguments") is not None else function.get("parameters")
        normal: dict[str, Any] = {
            "type": "function",
            "function": {"name": checked_text(function["name"]), "arguments": _arguments(arguments, drop_nulls)},
        }
        if isinstance(call.get("id"), str):
            normal["id"] = checked_text(call["id"])
        found.append(normal)
    return found


def _arguments(arguments: Any, drop_nulls: bool) -> dict[str, Any]:
    """Arguments as an object: they may be its JSON (whose nulls are meant)."""
    try:
        if isinstance(arguments, str):
            arguments = checked_value(load_json(arguments), drop_nulls=False) if arguments.strip() else {}
        else:
            arguments = checked_value({} if arguments is None else arguments, drop_nulls=drop_nulls)
    except RowError as error:
        if error.reason in ("invalid_json", "duplicate_key"):
            raise RowError("broken_tool_arguments", str(error)) from None
        raise
    if not isinstance(arguments, dict):
        raise RowError("broken_tool_arguments", f"an object was expected; found {type(arguments).__name__}")
    return arguments


def _is_supervised(turn: dict[str, Any]) -> bool:
    """What `weight` (0 or 1) and `train` of an assistant message say; without them it is supervised."""
    flags = [turn[key] for key in ("weight", "train") if turn.get(key) is not None]
    for flag in flags:
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise RowError("weight_not_0_or_1", f"found {flag if isinstance(flag, float) else shown(flag)}")
    return all(flags)
