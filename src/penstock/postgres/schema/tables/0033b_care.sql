-- Care that one process at a time does for all. Whoever does it locks the row. Advisory locks would not do: any login of the database
-- can hold one for ever, and nobody would recover jobs any more.

create table penstock.care (
    name text primary key
);
comment on table penstock.care is 'What one process at a time does for all: a row for each, to be locked. Only functions of the owner can lock them.';
insert into penstock.care (name) values ('recover'), ('tend_topics');
