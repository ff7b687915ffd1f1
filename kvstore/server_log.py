"""Where a server's log lines go: stderr, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """Time, level, message; a traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        text = f"{_time_of(record)} {record.levelname.lower():8} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def log_to_stderr(*, as_json: bool) -> None:
    """Send all log lines of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _time_of(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"
