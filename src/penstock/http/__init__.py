"""The HTTP API: Rickover's and Jobber's interfaces, workers without a driver, users and roles.

`penstock server` runs it; `create_app` makes it for a server of one's own. `Authorizer` is the place for one's own users.
"""

from penstock.core.extras import needs

with needs("http", "the HTTP API"):
    from penstock.http.auth import Authorizer, Credentials, Principal, Refused, Role
    from penstock.http.server import create_app, serve
    from penstock.http.settings import HttpSettings

__all__ = ["Authorizer", "Credentials", "HttpSettings", "Principal", "Refused", "Role", "create_app", "serve"]
