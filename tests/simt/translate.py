# SPDX-License-Identifier: Apache-2.0
"""CUDA source to C++, for what macros and functions (cuda.h, ptx.h) cannot say. Lines stay where they are.

- A `__shared__` declaration becomes a reference to (or, if it is `extern`, a pointer to) the storage of the thread's block.
- The instructions of an `asm` statement become calls of functions of ptx.h. An empty statement stays.
"""

import re

_SHARED = re.compile(
    r"(?P<extern>\bextern\s+)?\b(?:static\s+)?__shared__\s+(?:__align__\((?P<align>\d+)\)\s*)?"
    r"(?P<type>[^;=]+?)\s*\b(?P<name>\w+)\s*(?P<extents>(?:\[[^\]]*\]\s*)*);"
)
_ASM = re.compile(r"\basm\b\s*(?:volatile\b\s*)?(?=\()")
_OPERAND = re.compile(r'"[^"]*"\s*(?=\()')
_DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_INSTRUCTION = re.compile(r"(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.DOTALL)
_REGISTERS = {"u32": "unsigned"}


def translate(source: str) -> str:
    """The source, made into C++."""
    return _translate_asm(_SHARED.sub(_shared, source))


def _shared(match: re.Match[str]) -> str:
    type_, name, extents, align = match["type"], match["name"], match["extents"], match["align"] or "1"
    if "," in re.sub(r"<[^;]*>", "", type_):
        raise ValueError(f"declare one __shared__ variable at a time: {match[0]}")
    if match["extern"]:
        declaration = f"{type_}* const {name} = simt_dynamic_shared<{type_}>({align});"
    else:
        declaration = f'auto& {name} = simt_shared_variable<{type_}{extents}, __LINE__>("{name}", {align});'
    return declaration + "\n" * match[0].count("\n")


def _translate_asm(source: str) -> str:
    pieces, end = [], 0
    for match in _ASM.finditer(source):
        # In a comment.
        if source.rfind("//", source.rfind("\n", 0, match.start()) + 1, match.start()) >= 0:
            continue
        stop = _closing(source, match.end()) + 1
        if statement := _statement(source[match.end() + 1 : stop - 1]):
            pieces += [source[end : match.start()], statement, "\n" * source.count("\n", match.start(), stop)]
            end = stop
    return "".join(pieces) + source[end:]


def _statement(body: str) -> str:
    """The C++ of an asm statement, without the semicolon that follows it, or nothing if it has no instructions."""
    template, *lists = _split(body, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template)).replace("\\n", "\n").replace("\\t", " ")
    if not code.strip():
        return ""
    operands = []
    for text in lists[:2]:
        for match in _OPERAND.finditer(text):
            operands.append(text[match.end() : _closing(text, match.end()) + 1])

    def operand(text: str) -> str:
        text = text.strip()
        # An address in brackets, or a vector in braces, is its parts.
        inner = re.sub(r"^[\[{](.*)[\]}]$", r"\1", text, flags=re.DOTALL)
        if inner != text and "," in inner:
            return ", ".join(operand(part) for part in inner.split(","))
        inner = re.sub(r"\b0f([0-9a-fA-F]{8})\b", r"__uint_as_float(0x\1u)", inner)
        return re.sub(r"%(\d+)", lambda match: operands[int(match[1])], inner)

    statements = []
    for line in re.split(r"[;\n]|(?<=\{)(?!\s*%)|(?=\}\s*$)", code):
        line = line.strip()
        if line in ("", "{", "}"):
            statements.append(line)
        elif declared := _DECLARATION.fullmatch(line):
            statements.append(f"{_REGISTERS[declared[1]]} {declared[2]};")
        else:
            instruction = _INSTRUCTION.fullmatch(line)
            if instruction is None:
                raise ValueError(f"cannot read the PTX instruction {line!r}")
            name = instruction["opcode"].replace("::", "__").replace(".", "_")
            arguments = [operand(part) for part in _split(instruction["operands"], ",") if part.strip()]
            statements.append(f"simt::ptx::{name}({', '.join(arguments)});")
    return "do { " + " ".join(statements) + " } while (false)"


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for token in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    raise ValueError(f"unclosed parenthesis: {text[start : start + 80]!r}")


def _split(text: str, separator: str) -> list[str]:
    """Splits at separators outside of strings, parentheses, brackets and braces."""
    parts, depth, last = [], 0, 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]|' + re.escape(separator), text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == separator and depth == 0:
            parts.append(text[last : token.start()])
            last = token.end()
    return [*parts, text[last:]]
