"""The authorizer of a server that is given none."""

from __future__ import annotations

from penstock.http.auth import Authorizer, OneUser
from penstock.http.settings import HttpSettings
from penstock.http.users import Users
from penstock.postgres.database import Database


def authorizer_of(settings: HttpSettings, database: Database) -> Authorizer:
    """The user admin with the token of the settings, if there is one, and the users in the database."""
    stored = Users(database)
    return stored if settings.token is None else OneUser("admin", settings.token.get_secret_value(), stored)
