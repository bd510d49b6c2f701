"""Models that no library has, or not in the shape needed here: ordinary modules that know nothing of Evener."""

from evener.models.amoebanet import AmoebaNetD
from evener.models.resnet import resnet152
from evener.models.transformer import Transformer
from evener.models.unet import UNet

__all__ = ["AmoebaNetD", "Transformer", "UNet", "resnet152"]
