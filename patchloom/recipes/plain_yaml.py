"""YAML from files that anybody may have written: plain values, each written where it stands, of a bounded length."""

from typing import Any

import yaml

MAX_CHARACTERS = 1 << 19  # read in 8 seconds, whatever they are


class _Loader(yaml.SafeLoader):
    """No aliases: nine lines of them stand for a billion values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As YAML does, but for aliases."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()
            raise yaml.composer.ComposerError(None, None, f"found the alias *{alias.anchor}", alias.start_mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """The value; a ValueError says in one line what is wrong with it."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, expected at most {MAX_CHARACTERS:,}")
    try:
        return yaml.load(text, _Loader)
    except MemoryError:
        raise  # which is no fact about the text
    except Exception as error:  # a wrong date, deep nesting, a tag on what it is not made for: of nearly any kind
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(reason if isinstance(error, yaml.YAMLError | ValueError) else f"no value: {reason}") from error
