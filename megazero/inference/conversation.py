"""A conversation with a model: its turns, and the user's commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megazero.data.indexed import DataError
from megazero.inference.broadcast_json import read_on_first_rank
from megazero.inference.sampling import Sampling
from megazero.inference.terminal import Terminal
from megazero.inference.text_generator import Prompt, TextGenerator
from megazero.mpu.grid import ProcessGrid

Turn = dict[str, str]


def start_messages(system: str | None, *turns: Turn) -> list[Turn]:
    """The turns of a conversation, after the system's turn if there is one."""
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def user_message(text: str) -> Turn:
    return {"role": "user", "content": text}


@dataclass
class Conversation:
    """A conversation, on rank 0. system: the text of the system's turn; turns: those of user and assistant."""

    generator: TextGenerator
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def question(self, line: str) -> list[Prompt]:
        """The prompt for a line of the user. A command is executed, and has no prompt.

        Raises DataError for a wrong command or text, and leaves the conversation as it was.
        """
        if line.startswith("/"):
            self._obey(*line[1:].strip().partition(" ")[::2])
            return []
        text = line.strip()
        return self.generator.read_chats([start_messages(self.system, *self.turns, user_message(text))]) if text else []

    def remember(self, line: str, answer: str) -> None:
        """Add the user's turn and the answer. Without an answer (the user stopped it at once), add neither."""
        if answer:
            self.turns += [user_message(line.strip()), {"role": "assistant", "content": answer}]

    def _obey(self, command: str, rest: str) -> None:
        if command not in COMMANDS:
            raise DataError(f"/{command} is no command (/help lists them); with a blank in front it is a message")
        COMMANDS[command][0](self, rest.strip())

    def _help(self, rest: str) -> None:
        for name, (_, use) in COMMANDS.items():
            self.generator.note(f"/{name:<12} {use}")

    def _reset(self, rest: str) -> None:
        self.turns.clear()
        self.generator.note(
            "the conversation is forgotten" + ("" if self.system is None else "; the system's turn stays")
        )

    def _system(self, rest: str) -> None:
        if rest:
            self.generator.read_chats([start_messages(rest, user_message("?"))])  # some templates refuse such turns
        if not rest and self.system is None:
            self.generator.note("there is no system's turn; /system TEXT sets one")
            return
        self.system = rest or None
        self.generator.note(
            "the system's turn is " + ("set" if rest else "gone") + (" from the next answer on" if self.turns else "")
        )

    def _temperature(self, rest: str) -> None:
        try:
            self.generator.take(replace(self.generator.options.sampling, temperature=float(rest)))
        except ValueError:
            raise DataError(f"/temperature {rest}: a number from 0 on, where 0 takes the likeliest token") from None
        self.generator.note(f"temperature {self.generator.options.sampling.temperature:g}")


COMMANDS: Mapping[str, tuple[Callable[[Conversation, str], None], str]] = {
    "reset": (Conversation._reset, "forgets the conversation"),
    "system": (Conversation._system, "TEXT: what the system's turn in front says; without a text there is none"),
    "temperature": (Conversation._temperature, "T: the temperature of what follows; 0 takes the likeliest token"),
    "help": (Conversation._help, "lists the commands. Ctrl-C stops an answer, Ctrl-D ends the program"),
}


def converse(generator: TextGenerator, grid: ProcessGrid, conversation: Conversation | None) -> None:
    """Answer lines of the standard input until it ends. Rank 0 reads a line, and all ranks generate the answer.

    conversation: None if each line is a prompt of its own. A collective of all ranks.
    """
    terminal = Terminal(grid)
    generator.stopped = terminal.stopped
    if terminal.person and conversation is not None:
        generator.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the program")
    with terminal.kept():
        while _exchange(generator, grid, terminal, conversation):
            pass


def _exchange(
    generator: TextGenerator, grid: ProcessGrid, terminal: Terminal, conversation: Conversation | None
) -> bool:
    """Read and answer one line. Returns False at the end of the input."""
    try:
        found = read_on_first_rank(grid, lambda: _next(generator, terminal, conversation))
    except DataError as error:
        generator.note(f"error: {error}")
        return True
    if found is None:
        return False
    if found["prompts"]:
        generator.take(Sampling(**found["sampling"]))
        with terminal.listening():
            answers = generator.answer([(text, ids) for text, ids in found["prompts"]])
        if conversation is not None and answers:
            conversation.remember(found["prompts"][0][0], answers[0])
    return True


def _next(generator: TextGenerator, terminal: Terminal, conversation: Conversation | None) -> dict[str, Any] | None:
    """The prompts and sampling for the next line, on rank 0; None at the end of the input. Raises DataError."""
    line = terminal.line()
    if line is None:
        return None
    prompts = generator.read([line]) if conversation is None else conversation.question(line)
    return {"prompts": prompts, "sampling": asdict(generator.options.sampling)}
