"""The policy keeps kvtier's contract."""

from kvtier_second_chance import SecondChance

from kvtier_testing.policies import PolicyConformance


class TestSecondChance(PolicyConformance):
    policy = SecondChance
