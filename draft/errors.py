"""The one exception a user's mistake raises: it says which field, which value, and what to do."""


class UserError(ValueError):
    """Bad input, found before long work starts; the command line prints it and exits with 2.

    `field` is the option, key or file that is wrong, `value` what was seen there (None: nothing),
    and `remedy` an instruction that, when followed, makes the same command work.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        seen = field if value is None else f"{field}: {value!r}"
        super().__init__(f"{seen} {problem}. {remedy}")
