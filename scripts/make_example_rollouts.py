#!/usr/bin/env python3
"""Write example rollouts: a tool desk's agent, several trials a task, as JSON Lines of chats.

The agent is a small random policy over a simulated desk, so its trials share what real ones do:
the system message, the task, first turns (which are trained turns) and the beginnings of retries.
Two records are made on purpose: a trial that was stopped, whose messages are the beginning of
another's, and an exact duplicate. Equal arguments give an equal file.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SYSTEM = (
    "You are the assistant of a neighbourhood tool desk. Members borrow tools by the day.\n"
    "Rules: look a tool up before you promise it; reserve at most one tool a day for a member; if "
    "a tool is taken, offer another of its kind or the next day; never invent an id. Say in one or "
    "two sentences what you did."
)
TOOLS = {
    "drill": ("hang shelves", "in a brick wall", "the cordless one if you can"),
    "ladder": ("clean the gutters", "at about four metres", "it must fit into a small car"),
    "sander": ("refinish a table", "made of oak", "with fine paper, please"),
    "tile cutter": ("redo a bathroom", "with 60 cm tiles", "a wet one makes less dust"),
    "hedge trimmer": ("trim a long hedge", "along the street", "a quiet one, for the neighbours"),
    "pressure washer": ("wash the terrace", "before a party", "with the wide nozzle"),
    "wheelbarrow": ("move some gravel", "across the lawn", "with an air-filled wheel"),
    "jigsaw": ("build a rabbit hutch", "from plywood", "and a blade for curves"),
    "paint sprayer": ("paint a fence", "both sides", "I have my own paint"),
    "pipe wrench": ("change a radiator valve", "from the sixties", "the large size"),
    "multimeter": ("find a dead socket", "in the kitchen", "any model will do"),
    "clamp set": ("glue a guitar body", "out of maple", "at least six of them"),
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
Message = dict[str, Any]


@dataclass
class Trial:
    """One run of the policy: its messages and whether the member got a tool."""

    messages: list[Message]
    reserved: str | None = None
    calls: int = 0
    rng: random.Random = field(default_factory=random.Random)

    def say(self, content: str | None, name: str = "", **arguments: str) -> None:
        """An assistant turn, with a tool call if `name` is given."""
        message: Message = {"role": "assistant", "content": content}
        if name:
            self.calls += 1
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [
                {"id": f"call_{self.calls}", "type": "function", "function": function}
            ]
        self.messages.append(message)

    def hear(self, name: str, result: Any) -> None:
        """The result of the last tool call."""
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": f"call_{self.calls}",
                "name": name,
                "content": json.dumps(result),
            }
        )

    def user(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})


@dataclass(frozen=True)
class Task:
    """What a member wants, and what the desk has: ids of the kind with the days they are taken."""

    number: int
    tool: str
    day: int
    taken: dict[str, tuple[int, ...]]

    def opening(self) -> list[Message]:
        """The messages that every trial of the task begins with."""
        work, where, wish = TOOLS[self.tool]
        request = (
            f"Hi, member {4100 + 37 * self.number} here. I want to {work} {where} on "
            f"{DAYS[self.day]}. Could I have a {self.tool}, {wish}?"
        )
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]

    def is_free(self, item: str, day: int) -> bool:
        return day not in self.taken[item]


def make_task(number: int, rng: random.Random) -> Task:
    """A task with three tools of the kind, of which some are taken on the day."""
    tool = list(TOOLS)[number % len(TOOLS)]
    day = rng.randrange(len(DAYS) - 1)
    letters = "".join(word[0] for word in tool.split()).upper()
    items = [f"{letters}-{rng.randrange(100, 1000)}" for _ in range(3)]
    taken = {item: tuple(sorted(rng.sample(range(len(DAYS)), 2))) for item in items}
    taken[items[0]] = tuple(sorted({day, *taken[items[0]]}))  # the first try often fails
    return Task(number, tool, day, taken)


def run_trial(task: Task, rng: random.Random) -> Trial:
    """One trial of the random policy, at most two retries."""
    trial = Trial(task.opening(), rng=rng)
    tool, day = task.tool, task.day
    if rng.random() < 0.75:
        trial.say(f"Let me see which {tool}s we have.", "find", kind=tool)
    else:
        trial.say(None, "find", kind=tool)
    trial.hear("find", [{"id": item, "kind": tool} for item in task.taken])
    untried = list(task.taken)
    for _ in range(3):
        item = untried.pop(0 if rng.random() < 0.7 else rng.randrange(len(untried)))
        trial.say(None, "reserve", id=item, day=DAYS[day])
        if task.is_free(item, day):
            trial.hear("reserve", {"ok": True, "id": item, "day": DAYS[day]})
            trial.reserved = item
            closing = rng.choice(
                (
                    f"Done: {item} is reserved for you on {DAYS[day]}.",
                    f"You can pick up {tool} {item} on {DAYS[day]} from 8.",
                    f"I reserved {item} for {DAYS[day]}. Please bring it back clean.",
                )
            )
            trial.say(closing)
            return trial
        trial.hear("reserve", {"ok": False, "error": f"{item} is taken on {DAYS[day]}"})
        retry = rng.random()
        if retry < 0.3 and day + 1 < len(DAYS):
            trial.say(f"{item} is taken on {DAYS[day]}. Would {DAYS[day + 1]} do?")
            if rng.random() < 0.25:
                trial.user("No, it has to be that day.")
            else:
                day += 1
                untried.insert(0, item)
                trial.user("Yes, that works too.")
        elif retry < 0.4 or not untried:
            break
    trial.say(f"I am sorry, I found no free {tool} for {DAYS[day]}.")
    if rng.random() < 0.5:
        trial.user("Pity. Thank you anyway.")
        trial.say("You are welcome; try again next week.")
    return trial


def make_records(num_tasks: int, num_trials: int, seed: int) -> list[dict[str, Any]]:
    """All records: `num_trials` different trials a task, one stopped trial, one duplicate."""
    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for number in range(num_tasks):
        task = make_task(number, rng)
        trials: list[Trial] = []
        for _ in range(40 * num_trials):  # the policy has more than enough different outcomes
            trial = run_trial(task, rng)
            if len(trials) < num_trials and all(trial.messages != t.messages for t in trials):
                trials.append(trial)
        chats = [(trial.messages, float(trial.reserved is not None)) for trial in trials]
        if number == 0:  # stopped after its second turn: ends inside its own longer self
            longest = max(chats, key=lambda chat: len(chat[0]))[0]
            chats.append((longest[:5], 0.0))
        if number == num_tasks - 1:
            chats.append(chats[0])
        mean = sum(reward for _, reward in chats) / len(chats)
        for index, (messages, reward) in enumerate(chats):
            records.append(
                {
                    "id": f"{number}-{index}",
                    "task_id": number,
                    "trial": index,
                    "reward": reward,
                    "group": number,
                    "advantages": round(reward - mean, 4),
                    "messages": messages,
                }
            )
    return records


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/rollouts.jsonl"))
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    records = make_records(args.tasks, args.trials, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    args.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{args.out}: {len(records)} trajectories")


if __name__ == "__main__":
    main()
