"""Shows Trainer a run with a name as a checkpoint of its last committed step, so that Trainer's own code resumes."""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState

from lohan_ds.config import LohanConfig, parse
from lohan_ds.engine import LohanEngine
from lohan_ds.errors import ConfigError, StepError
from lohan_ds.run_state import RUN_MARK
from lohan_ds.store.commits import committed_step
from lohan_ds.store.filenames import named_run_dirs

logger = logging.getLogger(__name__)
_STATE_NAME = "trainer_state.json"   # of a checkpoint of Trainer
_UNWOUND = ("ReduceLROnPlateau", "GreedyLR")   # schedules that depend on more than the number of steps


@contextlib.contextmanager
def run_as_checkpoint(trainer: Any, given: str | bool | None) -> Iterator[str | bool | None]:
    """What to resume from: a directory that stands for the run if it is further than the checkpoint `given`, which
    counts as step 0 if it is None or False; else `given` itself."""
    config = _lohan_config(trainer)
    if given is True and config is not None:
        given = _last_whole_checkpoint(trainer.args.output_dir) or True   # True: Trainer says that there is none
    step = _committed_step(config)
    if not step or trainer.model_wrapped is not trainer.model:   # this Trainer has its engine already
        yield given
        return
    checkpoint = given if isinstance(given, str) else None
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    state = TrainerState(stateful_callbacks=[c for c in callbacks if isinstance(c, ExportableState)])
    if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, _STATE_NAME)):
        state = TrainerState.load_from_json(os.path.join(checkpoint, _STATE_NAME))
        if state.global_step >= step:
            yield checkpoint
            return
    args = trainer.args
    state = dataclasses.replace(state, global_step=step, train_batch_size=args.train_batch_size,
                                logging_steps=int(args.logging_steps), save_steps=int(args.save_steps),
                                eval_steps=int(args.eval_steps or state.eval_steps))
    with tempfile.TemporaryDirectory(prefix="lohan_run_") as folder:
        state.save_to_json(os.path.join(folder, _STATE_NAME))
        os.mkdir(os.path.join(folder, f"global_step{step}"))   # what Trainer looks for
        with open(os.path.join(folder, RUN_MARK), "w") as file:
            file.write(str(step))
        yield folder


def refuse_second_training(trainer: Any) -> None:
    """Trainer destroys its engine when it trains again, and the model's values with it. StepError."""
    engine = trainer.model_wrapped   # of evaluate() alone it has no offload
    if isinstance(engine, LohanEngine) and engine.offload is not None:
        raise StepError("this Trainer has trained already, and train() would destroy the engine that holds its model; "
                        "save the model (save_model) and make a new Trainer from it, or, with lohan.run_name, start "
                        "the script again")


def is_run(checkpoint: str) -> bool:
    return os.path.exists(os.path.join(checkpoint, RUN_MARK))


def wind_scheduler(trainer: Any) -> None:
    """Brings the LR schedule that Trainer has just made to the engine's step, unless the engine keeps it. ConfigError
    for one that depends on more than the number of steps."""
    engine, scheduler = trainer.model_wrapped, trainer.lr_scheduler
    if engine.lr_scheduler is not None:
        return
    if type(scheduler).__name__ in _UNWOUND:
        raise ConfigError(f"lohan.run_name: {type(scheduler).__name__} cannot follow a run to its step "
                          f"{engine.global_steps}; resume from a checkpoint, or use another lr_scheduler_type")
    inner = getattr(scheduler, "scheduler", scheduler)
    for _ in range(engine.global_steps - engine.skipped_steps):
        inner.step()


def _last_whole_checkpoint(output_dir: str) -> str | None:
    """The last checkpoint of Trainer that was not cut off while it was saved: Trainer writes its own state last."""
    if not os.path.isdir(output_dir):
        return None
    numbers = [int(match[1]) for name in os.listdir(output_dir) if (match := re.fullmatch(r"checkpoint-(\d+)", name))]
    for number in sorted(numbers, reverse=True):
        path = os.path.join(output_dir, f"checkpoint-{number}")
        if os.path.isfile(os.path.join(path, _STATE_NAME)):
            return path
        logger.warning("%s is not whole: its saving was cut off; looking for the one before", path)
    return None


def _lohan_config(trainer: Any) -> LohanConfig | None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return parse(plugin.deepspeed_config) if plugin is not None else None


def _committed_step(config: LohanConfig | None) -> int:
    """Of the run that the config names; 0 if there is none yet."""
    if config is None or config.run_name is None:
        return 0
    return committed_step(named_run_dirs(config.ssd_paths, config.run_name)) or 0
