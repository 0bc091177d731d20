"""Tests as users of Django write them; run by `manage.py test`, on each database."""
# ruff: noqa: PT009, PT027

import contextlib
import threading
from datetime import datetime, timezone

from django.db import DatabaseError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase

import tenure
from tenure.integrations.django import node_arguments
from tests.integrations.django_project.ledger.models import Entry

DUE = datetime(2025, 6, 1, tzinfo=timezone.utc)


class Led:
    """A term that is over, one that is not, and the node of both."""

    @classmethod
    def setUpClass(cls):
        cls.node = tenure.Node(**node_arguments()).start()
        with cls.node.lead("ledger", timeout=60) as cls.stale:
            pass
        cls.term = cls.node.election("ledger").wait(timeout=60)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.node.close()

    def test_a_fenced_block_writes(self):
        with transaction.atomic():
            self.term.fence(connection)
            Entry.objects.create(text="fenced")
        self.assertEqual(Entry.objects.count(), 1)

    def test_a_durable_block_may_be_fenced(self):
        with transaction.atomic(durable=True):
            self.term.fence(connections["default"])

    def test_autocommit_is_refused(self):
        with self.assertRaisesMessage(tenure.ConfigError, "with transaction.atomic()"):
            self.term.fence(connection)
        Entry.objects.create(text="and nothing is broken by that")

    def test_a_term_that_is_over_is_refused_and_the_block_rolled_back(self):
        with self.assertRaises(tenure.Fenced), transaction.atomic():
            Entry.objects.create(text="lost")
            self.stale.fence(connection)
        self.assertEqual(Entry.objects.count(), 0)

    def test_a_block_that_swallows_the_refusal_cannot_write_nor_commit(self):
        with transaction.atomic():
            Entry.objects.create(text="lost")
            with contextlib.suppress(tenure.Fenced):
                self.stale.fence(connection)
            with self.assertRaises(TransactionManagementError):
                Entry.objects.create(text="lost, too")
        self.assertEqual(Entry.objects.count(), 0)
        Entry.objects.create(text="the connection is as good as before")

    def test_a_nested_block_may_be_fenced_where_the_outermost_is(self):
        with transaction.atomic():
            self.term.fence(connection)
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                self.term.fence(connection)
                1 / 0  # noqa: B018
            with transaction.atomic():
                self.term.fence(connection)
                Entry.objects.create(text="nested")
        self.assertEqual(Entry.objects.count(), 1)

    def test_a_nested_block_without_a_savepoint_is_part_of_its_transaction(self):
        with transaction.atomic(), transaction.atomic(savepoint=False):
            self.term.fence(connection)

    def test_a_run_is_claimed_once(self):
        for first in (True, False):
            with transaction.atomic():
                self.assertIs(self.term.claim(connection, self.id(), DUE), first)

    def test_a_claim_of_a_block_that_failed_stands_not(self):
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            self.term.claim(connection, self.id(), DUE)
            1 / 0  # noqa: B018
        with transaction.atomic():
            self.assertTrue(self.term.claim(connection, self.id(), DUE))


class InATestCase(Led, TestCase):
    """Every block is a savepoint here, and nothing is ever committed."""

    def test_the_fence_adds_nothing_to_what_runs_on_commit(self):
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            self.term.fence(connection)
            transaction.on_commit(list)
        self.assertEqual(len(callbacks), 1)

    def test_the_fence_locks_nothing_so_the_role_can_change_hands_meanwhile(self):
        if connection.vendor == "sqlite":
            self.skipTest("a test that has written keeps all others from writing")
        with self.node.lead("other", timeout=60) as term, transaction.atomic():
            term.fence(connection)
            Entry.objects.create(text="fenced")
        with self.node.lead("other", timeout=60) as successor, transaction.atomic():
            successor.fence(connection)
            with self.assertRaises(tenure.Fenced):
                term.fence(connection)


class InATransactionTestCase(Led, TransactionTestCase):
    """Blocks are transactions, as in production."""

    def test_a_nested_block_is_refused_where_the_outermost_is_not_fenced(self):
        with self.assertRaisesMessage(tenure.ConfigError, "savepoint"), transaction.atomic(), transaction.atomic():
            self.term.fence(connection)

    def test_a_fence_of_the_transaction_before_does_not_count(self):
        block = transaction.atomic()  # as a decorator would use it again and again
        with block:
            self.term.fence(connection)
        with self.assertRaisesMessage(tenure.ConfigError, "savepoint"), block, transaction.atomic():
            self.term.fence(connection)

    def test_a_refusal_that_was_swallowed_runs_no_hook_of_on_commit(self):
        ran = []
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append("lost"))
            with contextlib.suppress(tenure.Fenced):
                self.stale.fence(connection)
        with transaction.atomic():
            self.term.fence(connection)
            transaction.on_commit(lambda: ran.append("kept"))
        self.assertEqual(ran, ["kept"])

    def test_transactions_by_hand_are_fenced_too(self):
        transaction.set_autocommit(False)
        try:
            Entry.objects.create(text="lost")
            with self.assertRaises(tenure.Fenced):
                self.stale.fence(connection)
            transaction.rollback()
            self.term.fence(connection)
            Entry.objects.create(text="kept")
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        self.assertEqual([entry.text for entry in Entry.objects.all()], ["kept"])

    def test_no_successor_before_the_fenced_block_has_ended(self):
        with tenure.Node(**node_arguments()) as other:
            election = self.node.election("shift")
            term = election.wait(timeout=60)
            succession = other.election("shift")
            with transaction.atomic():
                term.fence(connection)
                leaving = threading.Thread(target=election.withdraw)
                leaving.start()
                with self.assertRaises(tenure.WaitTimeout):
                    succession.wait(timeout=1)
                Entry.objects.create(text="in time")
            leaving.join()
            self.assertGreater(succession.wait(timeout=60).token, term.token)
            with self.assertRaises(tenure.Fenced), transaction.atomic():
                term.fence(connection)
            self.assertEqual(Entry.objects.count(), 1)

    def test_a_database_error_in_the_fence_is_the_databases(self):
        with self.assertRaises(DatabaseError), transaction.atomic():
            with connection.cursor() as cursor, self.assertRaises(DatabaseError):
                cursor.execute("no sql")
            self.term.fence(connection)
            raise DatabaseError("where the transaction survives a wrong statement")
