from __future__ import annotations

import random
import uuid

from tenure.core.membership import random_uuid


def test_an_id_is_a_random_uuid_of_version_4():
    chance = random.Random(1)
    for bits in (0, 2**128 - 1, *(chance.getrandbits(128) for _ in range(1000))):
        assert random_uuid(bits) == str(uuid.UUID(int=bits, version=4))
