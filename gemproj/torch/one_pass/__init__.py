"""The gradients of all past tasks in one forward and one backward pass, where that is possible and faster."""

from gemproj.torch.one_pass.calls import NotPossible
from gemproj.torch.one_pass.choice import Choice, kind_of
from gemproj.torch.one_pass.gradients import Pass, concatenate, one_pass

__all__ = ["Choice", "NotPossible", "Pass", "concatenate", "kind_of", "one_pass"]
