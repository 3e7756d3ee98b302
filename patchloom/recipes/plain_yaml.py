"""Reading untrusted YAML: plain values only, without aliases and of bounded length."""

from typing import Any

import yaml

MAX_CHARACTERS = 1 << 19  # any text of this length is parsed within 8 seconds


class _Loader(yaml.SafeLoader):
    """A loader without aliases: nine lines of them can expand to a billion values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, but refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.composer.ComposerError(None, None, f"found the alias *{alias.anchor}", alias.start_mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Return the value. Raise ValueError with a one-line reason."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, expected at most {MAX_CHARACTERS:,}")
    try:
        return yaml.load(text, _Loader)
    except MemoryError:
        raise  # not caused by the text
    except Exception as error:  # a wrong date, deep nesting, a tag in the wrong place: errors of nearly any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason if isinstance(error, yaml.YAMLError | ValueError) else f"no value: {reason}") from error
