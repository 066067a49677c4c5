"""Task `tools`: arithmetic and look-up questions that the policy answers by calling tools over several turns."""

from __future__ import annotations

from tasks.calculator import calculate, extract_expressions
from tasks.tool_calls import parse_tool_calls

__all__ = ["calculate", "extract_expressions", "parse_tool_calls"]
