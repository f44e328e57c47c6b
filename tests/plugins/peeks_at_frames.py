"""Looks for the labels in the frames of its callers, by way of an exception."""

from typing import ClassVar

import torch

import sparsebench


class PeeksAtFrames(sparsebench.Strategy):
    name: ClassVar[str] = "peeks_at_frames"

    def scores(self, view):
        scores = view.tokens.sum(dim=-1)
        try:
            raise LookupError
        except LookupError as error:
            frame = error.__traceback__.tb_frame
        while frame is not None:
            samples = frame.f_locals.get("samples")
            if samples is not None:
                return torch.sin(scores + samples.labels[: len(scores), None] * torch.arange(scores.shape[1]))
            frame = frame.f_back
        return scores


@sparsebench.hookimpl
def sparsebench_strategies():
    return [PeeksAtFrames]
