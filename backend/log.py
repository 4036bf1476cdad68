"""The log of our processes: one line a record, whatever clients put into their ids."""

import logging

import msgspec

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class OneLineFormatter(logging.Formatter):
    """Line breaks and other control characters of a message are escaped; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPED)
        return super().formatMessage(record)


def start_log(program: str, level: int = logging.INFO) -> None:
    """Log to stderr under the program's name."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(f"%(asctime)s {program}[%(process)d] %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def quoted(text: str) -> str:
    """A client's text as the value of a log line's field: a JSON string."""
    return msgspec.json.encode(text).decode()
