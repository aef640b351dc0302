"""What is learned: trajectory groups become token sequences, packed rows, a loss, an optimizer step, a checkpoint.

The way of one step, in the order of the modules::

    groups ──samples──> TrainingSample ──advantages──> ──packing──> PackedRow ──policy──> log-probabilities
           ──loss──> gradients ──step──> AdamW ──checkpoint──> {step:04d}/

`trainer.Trainer` walks it. `config` and `checkpoint` need no torch.
"""
