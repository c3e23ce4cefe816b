"""What users import to say how tokens are chosen: `from baton.sampling import SamplingParams`."""

from baton.protocol.sampling import GuidedDecoding, SamplingParams

__all__ = ["GuidedDecoding", "SamplingParams"]
