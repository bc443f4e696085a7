-- Users of the HTTP API. A row is made by penstock.add_user and lives until remove_user; what is kept of the secret is
-- an Argon2 hash. No role reads this table, see grant_access: the functions are the only way.

create table penstock.users (
    name text primary key,
    role text not null,
    types text[],
    secret_hash text not null,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    constraint users_name_check check (name ~ '^[A-Za-z0-9_-]{1,64}$'),
    constraint users_role_check check (role in ('read', 'enqueue', 'work', 'admin')),
    constraint users_types_check check (cardinality(types) > 0)
);
comment on table penstock.users is 'The users of the HTTP API.';
comment on column penstock.users.name is 'Name with which the user authenticates.';
comment on column penstock.users.role is
    'read looks; enqueue also enqueues, cancels, replays; work also claims and settles; admin does everything.';
comment on column penstock.users.types is 'The job types that the user may touch; null: all.';
comment on column penstock.users.secret_hash is 'Argon2 hash of the password or token.';
comment on column penstock.users.created_at is 'When the user was added.';
comment on column penstock.users.updated_at is 'When its role, types or secret last changed.';
