"""What all tasks of pictures share: how a network is trained on them."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from pydantic import Field

from sparsebench.errors import UserError
from sparsebench.tasks.base import Inputs, Recipe, Task, Validated

RECIPE = tuple(field.name for field in fields(Recipe))


class PictureTask(Task):
    """Pictures with classes. Recipe: AdamW with warm-up and cosine decay; flips, shifts and early stopping if asked.

    Attributes:
        training: names of the parameters that are about training and measuring: they do not touch what is drawn.
        official: whether the data come with a validation split of their own.
    """

    inputs: ClassVar[Inputs] = "images"
    default_model: ClassVar[str] = "vit"
    training: ClassVar[frozenset[str]] = frozenset({*RECIPE, "spuriosity"})
    official: ClassVar[bool] = False

    test: int = Field(400, gt=0, description="test images")
    epochs: int = Field(5, gt=0, description="epochs of training")
    batch: int = Field(64, gt=0, description="images per step")
    lr: float = Field(1e-3, gt=0, description="largest learning rate")
    weight_decay: float = Field(0.05, ge=0, description="AdamW's weight decay")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")
    spuriosity: int = Field(0, ge=0, description="test images on which each token's influence is measured; 0 for none")

    warmup: float = Field(0.0, ge=0, lt=1, description="share of the steps in which the learning rate rises to lr")
    smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing, only in the training loss")
    flip: bool = Field(False, description="random horizontal flips of training images")
    shift: int = Field(0, ge=0, description="random shifts of training images by up to this many pixels")
    accumulate: int = Field(1, gt=0, description="number of parts of a batch, to save memory; the step stays the same")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of training images for validation; an official split has priority"
    )
    patience: int = Field(
        0, ge=0, description="epochs without a better validation result before training stops; 0: never"
    )
    validate_by: Validated = Field("accuracy", description="the validation result: accuracy, or the worst group's")

    def check(self) -> None:
        """See `Task.check`."""
        if self.patience and not (self.validation or self.official):
            raise UserError(
                "patience needs a validation split", got=f"patience={self.patience}, validation=0",
                next_step="hold some training images back, as in validation=0.1",
            )  # fmt: skip
        canvas = getattr(self, "canvas", None)
        if canvas is not None and self.shift >= canvas:
            raise UserError("shift", got=self.shift, allowed=f"less than the image's {canvas} pixels")

    def recipe(self) -> Recipe:
        """See `Task.recipe`."""
        asked = {name: getattr(self, name) for name in RECIPE if name in type(self).model_fields}
        return Recipe("cross-entropy", "adamw", steps=self.epochs * 10**9, **asked)
