"""Calibration: from text to exit projections, routers and thresholds, with a report on what they are worth."""

from calib.pipeline import Calibration, calibrate
from calib.texts import Text, read_texts

__all__ = ["Calibration", "Text", "calibrate", "read_texts"]
