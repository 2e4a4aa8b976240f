"""Where engine, optimizer and checkpoint meet: weights in and out, and everything that a run needs to go on."""

from fullshard.saving.full import save as save
