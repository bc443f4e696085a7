-- The dashboard: who is logged in, what was changed through it, and which failures are muted.
--
-- The life of a session. A login writes a row, whose id is the SHA-256 of a random token that only the cookie of the browser holds.
-- A row with single_use is the link that a server prints at its start: the first request with its token deletes it, and a session takes
-- its place. A logout deletes the row; the next login deletes those whose end has come. No role reads the table, see grant_access.
--
-- The life of a change. The row is written before the change is made, and completed with what became of it. A row without an end is a
-- change whose process was lost meanwhile: it may have been made or not.
--
-- The life of a mute. A user who knows of a failure mutes it: jobs that fail so are no longer among what is wrong. The row stays until the
-- mute is taken back; what is muted is shown with the failures.

create table penstock.sessions (
    id bytea primary key,
    user_name text not null,
    role text not null,
    types text[],
    proof bytea,
    single_use boolean not null default false,
    created_at timestamptz not null,
    expires_at timestamptz not null,
    constraint sessions_role_check check (role in ('read', 'enqueue', 'work', 'admin'))
);
comment on table penstock.sessions is 'Who is logged in to the dashboard.';
comment on column penstock.sessions.id is 'SHA-256 of the token in the cookie.';
comment on column penstock.sessions.user_name is 'The user.';
comment on column penstock.sessions.role is 'Role of the user at the login.';
comment on column penstock.sessions.types is 'The job types that the user may see; null: all.';
comment on column penstock.sessions.proof is
    'A hash, keyed by the token, of what the secret of the user was: another password ends the session. Null: nothing to compare.';
comment on column penstock.sessions.single_use is 'Whether it is a link, which the first request uses up.';
comment on column penstock.sessions.created_at is 'When the user logged in.';
comment on column penstock.sessions.expires_at is 'When the session ends.';

create index sessions_expired on penstock.sessions (expires_at);

create table penstock.changes (
    id bigint generated always as identity primary key,
    at timestamptz not null,
    user_name text not null,
    database_role text not null default session_user,
    action text not null,
    filter jsonb not null,
    ended_at timestamptz,
    changed bigint,
    error text
);
comment on table penstock.changes is 'The audit: what users changed through the dashboard, admins also through the HTTP API, and logins to the dashboard.';
comment on column penstock.changes.id is 'Number of the change, in the order in which they began.';
comment on column penstock.changes.at is 'When it began.';
comment on column penstock.changes.user_name is 'The user of the HTTP API, as the server says.';
comment on column penstock.changes.database_role is 'The role that was logged in to the database when the row was written, such as that of the server: this is proven.';
comment on column penstock.changes.action is 'What was done, such as replay or pause.';
comment on column penstock.changes.filter is 'To what: the job, the type, or the conditions of an operation. No payload is in it.';
comment on column penstock.changes.ended_at is 'When it was made or refused; null: that is not known.';
comment on column penstock.changes.changed is 'How many objects it changed, as far as that was known at its end.';
comment on column penstock.changes.error is 'Why it was refused; null: it was not.';

create table penstock.muted_failures (
    name text not null,
    signature text not null,
    muted_at timestamptz not null,
    muted_by text not null,
    primary key (name, signature)
);
comment on table penstock.muted_failures is 'Failures that are known, so that the overview does not count them among what is wrong.';
comment on column penstock.muted_failures.name is 'Job type.';
comment on column penstock.muted_failures.signature is 'Signature of the errors.';
comment on column penstock.muted_failures.muted_at is 'Since when.';
comment on column penstock.muted_failures.muted_by is 'The user of the HTTP API who muted them.';
