"""The optimizers of this package inside the frameworks that people train with; each module needs its framework.

accelerate:    `attach(accelerator, model, optimizer)` for a plain loop; `save_state` keeps every rank's state.
transformers:  `BirderTrainer`, or the mixin `BirderTrainerMixin` for your own Trainer.
lightning:     `BirderCallback`.

They attach when the framework has wrapped the model, refuse its clipping where that would have no effect, and save and load
the state of every rank. What works with which: docs/frameworks.md.
"""
