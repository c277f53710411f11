"""Models of classes that cannot hold fewer K/V heads, written as classes that can, with the same function exactly."""

from headpool.convert.transcode.find import find, transcoding_of
from headpool.convert.transcode.plan import Transcript, plan_transcoding, transcribe
from headpool.convert.transcode.table import Transcoding

__all__ = ["Transcoding", "Transcript", "find", "plan_transcoding", "transcoding_of", "transcribe"]
