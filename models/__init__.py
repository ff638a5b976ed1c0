"""Models as tasks: flax NNX modules behind the trainer's Task protocol, without importing the trainer.

Reading order: ``losses``, ``nnx_task``, ``image_classifier``, ``mlp``, ``transformer``, ``vit``, ``gpt``,
``batch_norm``, ``resnet``. Each task class is a frozen dataclass whose fields are what ``[task.args]`` may set.
"""
