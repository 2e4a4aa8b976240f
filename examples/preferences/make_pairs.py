"""Makes the data of examples/preferences_t5.yaml: complaints, with a friendly and a rude reply to each.

    python examples/preferences/make_pairs.py

It writes examples/data/preferences/answers.csv, with both replies as answers, and train.csv and held_out.csv, in which
the friendly reply is preferred. Held-out complaints are about things that the others are not about together.
"""

import csv
import random
from pathlib import Path

THINGS = ("card", "parcel", "refund", "ticket", "phone", "book", "lamp", "chair", "coat", "bike", "table", "clock")
PROBLEMS = ("is late", "is lost", "is broken", "is too small", "was stolen", "has the wrong colour")
PEOPLE = ("i", "my mother", "my neighbour", "our office", "a friend", "the school")
FRIENDLY = ("we are sorry about the {thing}, help is on its way", "thank you for telling us, we replace the {thing}")
RUDE = ("look after your {thing} next time", "the {thing} is not our problem")


def main() -> None:
    """Write the three files."""
    draw = random.Random(7)
    pairs = [(person, thing, problem) for person in PEOPLE for thing in THINGS for problem in PROBLEMS]
    draw.shuffle(pairs)
    rows = []
    for number, (person, thing, problem) in enumerate(pairs):
        prompt = f"{person} called: the {thing} {problem}"
        rows.append([prompt, FRIENDLY[number % 2].format(thing=thing), RUDE[number // 2 % 2].format(thing=thing)])
    train, held_out = rows[60:], rows[:60]
    directory = Path(__file__).parents[1] / "data" / "preferences"
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "answers.csv", ["prompt", "answer"], [[row[0], text] for row in train for text in row[1:]])
    write(directory / "train.csv", ["prompt", "chosen", "rejected"], train)
    write(directory / "held_out.csv", ["prompt", "chosen", "rejected"], held_out)
    print(f"{len(train)} pairs and {len(held_out)} held-out ones written to {directory}")


def write(path: Path, columns: list[str], rows: list[list[str]]) -> None:
    """Write a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
