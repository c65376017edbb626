"""MindSpeed's base class of operators that are compiled at their first use."""


class MindSpeedOpBuilder:
    name = "operator"

    def load(self, verbose=True):
        return f"compiled {self.name}"
