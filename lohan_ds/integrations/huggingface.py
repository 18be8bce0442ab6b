"""Where lohan attaches to Accelerate and transformers. Each function gets the module that was just imported."""
from __future__ import annotations

import functools
import sys

from lohan_ds.config import effective_ds_config, parse


def patch_accelerate(module) -> None:
    """`HfDeepSpeedConfig`, which Trainer and Accelerate both read a JSON through, checks the lohan section and turns
    ZeRO-Infinity's keys and the literal "auto" inside it into what the later passes can stand."""
    config_class = module.HfDeepSpeedConfig
    original = config_class.__init__

    @functools.wraps(original)
    def checked(self, config_file_or_dict):
        original(self, config_file_or_dict)
        if "lohan" in self.config and parse(self.config) is not None:
            if "stage" not in self.config.get("zero_optimization", {}):
                self.config.setdefault("zero_optimization", {})["stage"] = 3
            self.config = effective_ds_config(self.config)
            self.set_stage_and_offload()

    config_class.__init__ = checked


def patch_transformers(module) -> None:
    """A model that does not fit is refused when its construction begins, before any weight is loaded."""
    model_class = module.PreTrainedModel
    original = model_class.__init__

    @functools.wraps(original)
    def admitted(self, config, *args, **kwargs):
        if "deepspeed" in sys.modules:   # else there is no config of it
            from lohan_ds.integrations import admission
            admission.check_before_loading(self, config)
        original(self, config, *args, **kwargs)

    model_class.__init__ = admitted


def patch_trainer(module) -> None:
    """Trainer's counters, data and LR schedule follow a run with a name to its last committed step."""
    trainer_class = module.Trainer
    train, load = trainer_class.train, trainer_class._load_optimizer_and_scheduler
    run_epoch, load_best = trainer_class._run_epoch, trainer_class._load_best_model

    @functools.wraps(train)
    def resumed(self, resume_from_checkpoint=None, *args, **kwargs):
        if not self.is_deepspeed_enabled:
            return train(self, resume_from_checkpoint, *args, **kwargs)
        from lohan_ds.integrations import resuming
        resuming.refuse_second_training(self)
        with resuming.run_as_checkpoint(self, resume_from_checkpoint) as checkpoint:
            return train(self, checkpoint, *args, **kwargs)

    @functools.wraps(load)
    def scheduled(self, checkpoint):
        if checkpoint is not None and self.is_deepspeed_enabled:
            from lohan_ds.integrations import resuming
            if resuming.is_run(checkpoint):
                resuming.wind_scheduler(self)
                return
        load(self, checkpoint)

    @functools.wraps(run_epoch)
    def run_unless_finished(self, *args, resume_from_checkpoint=None, **kwargs):
        if resume_from_checkpoint is not None and self.state.global_step >= self.state.max_steps:
            from lohan_ds.integrations import resuming
            if resuming.is_run(resume_from_checkpoint):   # Trainer would look only after one more step
                self.control.should_training_stop = True
                return None
        return run_epoch(self, *args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @functools.wraps(load_best)
    def run_ended(self):
        if hasattr(self.model_wrapped, "end_run"):   # else starting again would go on from the best step
            self.model_wrapped.end_run()
        load_best(self)

    trainer_class.train = resumed
    trainer_class._load_best_model = run_ended
    trainer_class._run_epoch = run_unless_finished
    trainer_class._load_optimizer_and_scheduler = scheduled
