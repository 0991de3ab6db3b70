"""Turns: few who are told of a peer go on at once, of many some go on each turn of the loop, in their order."""

from __future__ import annotations

import asyncio

from kvd.service.peers import turns
from kvd.service.peers.turns import Turns


async def told(sizes: list[int]) -> list[tuple[int, int]]:
    """Who is told in which turn of the loop, by the number of the size."""
    giving, found = Turns(), list[tuple[int, int]]()
    at = 0

    async def one(number: int, size: int) -> None:
        await giving.take(size)
        found.append((number, at))

    tasks = [asyncio.create_task(one(number, size)) for number, size in enumerate(sizes)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        at += 1
    return found


def most_in_a_turn(found: list[tuple[int, int]]) -> int:
    return max(sum(at == turn for _, at in found) for _, turn in found)


def test_a_few_go_on_in_the_turn_in_which_they_ask() -> None:
    found = asyncio.run(told([50_000] * 8))
    assert {at for _, at in found} == {0}


def test_of_many_some_go_on_each_turn_in_their_order() -> None:
    found = asyncio.run(told([100_000] * 200))
    assert [number for number, _ in found] == list(range(200))
    assert most_in_a_turn(found) == -(-turns.TURN_BYTES // 100_000)


def test_small_answers_cost_a_turn_something_too() -> None:
    assert most_in_a_turn(asyncio.run(told([0] * 1000))) == turns.TURN_BYTES // turns.LEAST_BYTES


def test_an_answer_as_large_as_a_turn_has_one_of_its_own() -> None:
    found = asyncio.run(told([turns.TURN_BYTES] * 5))
    assert most_in_a_turn(found) == 1


def test_who_is_given_up_holds_up_nobody() -> None:
    async def run() -> list[int]:
        giving, found = Turns(), list[int]()

        async def one(number: int) -> None:
            await giving.take(turns.TURN_BYTES)
            found.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await giving.take(1)
        return found

    assert asyncio.run(run()) == [0, 2, 3]
