"""Libraries' own progress bars and chatter are switched off: a command shows its own."""

import logging
import warnings


def quiet_libraries() -> None:
    """Keep transformers, datasets and the hub client from writing to the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("datasets", "huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
